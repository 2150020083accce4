-- The bank, version 6. `log` is what happened, in order. `snapshots.py` adds to every other table what its rows were at a snapshot.

CREATE TABLE log (
    seq       INTEGER PRIMARY KEY AUTOINCREMENT,
    step      INTEGER NOT NULL,   -- completed actor steps
    extractor INTEGER NOT NULL,   -- the extractor's policy version
    kind      TEXT NOT NULL,      -- submit, dead, revive, forget (by the upgrade alone) | add, update, return, up, down, drop, malformed,
                                  -- evict | refine | chunk, merge, discard | import | retrieve, credit, stray, lift, train | snapshot
    origin    TEXT NOT NULL,      -- the request, the merge, the episode, the group or the entry that it is about
    op        INTEGER NOT NULL,   -- which op of that origin
    data      TEXT NOT NULL       -- JSON
);

-- What a request, a merge, an episode or a group did, it did once.
CREATE UNIQUE INDEX log_once ON log (origin, op, kind)
    WHERE kind IN ('add', 'update', 'return', 'up', 'down', 'drop', 'malformed', 'evict', 'refine', 'chunk', 'merge', 'discard', 'credit',
        'stray', 'lift');

CREATE INDEX log_kind ON log (kind);

CREATE TABLE requests (
    id       TEXT PRIMARY KEY,    -- run/step/group/member
    step     INTEGER NOT NULL,
    team     INTEGER NOT NULL,    -- the group ("group" is SQL's)
    member   INTEGER NOT NULL,
    state    TEXT NOT NULL CHECK (state IN ('pending', 'leased', 'done', 'dead')),
    reason   TEXT,                -- why it is dead, or why its last attempt failed
    payload  TEXT,                -- JSON; NULL once done
    attempts INTEGER NOT NULL DEFAULT 0  -- that failed
) WITHOUT ROWID;

CREATE INDEX requests_queue ON requests (state, step, team, member, id);

CREATE TABLE generations (
    id         TEXT PRIMARY KEY,  -- the request's, the merge's or the question's
    extractor  INTEGER NOT NULL,  -- policy version when it began
    prompt     BLOB NOT NULL,     -- token ids, little-endian int32
    sampled    BLOB NOT NULL,     -- token ids, little-endian int32
    logprobs   BLOB NOT NULL,     -- behaviour log-probs of `sampled`, little-endian float64
    versions   BLOB NOT NULL,     -- policy version of each token of `sampled`, little-endian int32
    finish     TEXT NOT NULL,     -- stop or length
    head       INTEGER NOT NULL,  -- sampled tokens before the first op
    c_train    INTEGER NOT NULL DEFAULT 0,
    t_last     INTEGER,           -- the actor step that last trained on it
    kept       BLOB,              -- kept sets of `sampled`, one after the other: token ids, int32; NULL without top-p and top-k
    kept_counts BLOB              -- number of ids in each kept set, int32; NULL without top-p and top-k
);

CREATE TABLE entries (
    written INTEGER PRIMARY KEY,  -- seq at which the current version was written; in an upgraded bank an earlier one, in the same order
    uid     TEXT NOT NULL UNIQUE, -- request#op of the add that made it
    version INTEGER NOT NULL,
    text    TEXT NOT NULL,
    task    TEXT NOT NULL,
    goal    TEXT NOT NULL,
    parents TEXT NOT NULL,        -- JSON list of uid@version
    status  TEXT NOT NULL CHECK (status IN ('active', 'evicted', 'merged')),
    vector  BLOB NOT NULL,        -- embedding of its key, little-endian float32
    variation TEXT NOT NULL DEFAULT '', -- variation of the task; empty if the goal identifies the place
    reward  REAL                  -- sum of the rewards of the episode that it was written about; NULL if unknown or about none
);

CREATE INDEX entries_active ON entries (goal) WHERE status = 'active';
CREATE INDEX entries_written ON entries (written) WHERE status = 'active';

-- What earns credit: one version of one entry, a refinement (uid is its generation, version 1), or (version 0) a generation that held
-- no op.
CREATE TABLE units (
    uid                TEXT NOT NULL,
    version            INTEGER NOT NULL,
    generation         TEXT NOT NULL,
    start              INTEGER NOT NULL,   -- its tokens in the generation's `sampled`: start … stop − 1
    stop               INTEGER NOT NULL,
    retrieved          INTEGER NOT NULL DEFAULT 0,
    last_returned_step INTEGER,
    credited           INTEGER NOT NULL DEFAULT 0,  -- episodes ever
    credit             REAL NOT NULL DEFAULT 0,     -- Σ r over them
    pending_count      INTEGER NOT NULL DEFAULT 0,  -- episodes not yet trained on
    pending_sum        REAL NOT NULL DEFAULT 0,
    ready              INTEGER,                     -- seq at which it became ready; NULL with nothing pending
    votes              INTEGER NOT NULL DEFAULT 0,  -- the extractor's up votes on this version less its down votes
    lift_groups        INTEGER NOT NULL DEFAULT 0,  -- groups that it guided and that have experience-free members
    lift_mean          REAL,                        -- mean over them of guided − free success; NULL without one
    lift_m2            REAL NOT NULL DEFAULT 0,     -- sum of the squared deviations from that mean
    PRIMARY KEY (uid, version)
) WITHOUT ROWID;

CREATE INDEX units_ready ON units (ready) WHERE ready IS NOT NULL;
CREATE INDEX units_generation ON units (generation);

CREATE TABLE facts (
    name  TEXT PRIMARY KEY,       -- embedder: what made entries.vector; begun: the log's last seq when a copy began anew
    value TEXT NOT NULL
) WITHOUT ROWID;

-- Log rows that one can go back to.
CREATE TABLE snapshots (seq INTEGER PRIMARY KEY);
