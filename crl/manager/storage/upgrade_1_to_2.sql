-- From version 1 of the bank to version 2: `schema.sql` says what is there then.

ALTER TABLE requests ADD COLUMN attempts INTEGER NOT NULL DEFAULT 0;

CREATE TABLE entries_2 (
    written INTEGER PRIMARY KEY,
    uid     TEXT NOT NULL UNIQUE,
    version INTEGER NOT NULL,
    text    TEXT NOT NULL,
    task    TEXT NOT NULL,
    goal    TEXT NOT NULL,
    parents TEXT NOT NULL,
    status  TEXT NOT NULL CHECK (status IN ('active', 'evicted', 'merged')),
    vector  BLOB NOT NULL
);
INSERT INTO entries_2 SELECT rowid, uid, version, text, task, goal, parents, status, vector FROM entries;
DROP TABLE entries;
ALTER TABLE entries_2 RENAME TO entries;
CREATE INDEX entries_active ON entries (goal) WHERE status = 'active';

DROP INDEX log_once;
CREATE UNIQUE INDEX log_once ON log (origin, op, kind)
    WHERE kind IN ('add', 'update', 'return', 'drop', 'malformed', 'evict', 'chunk', 'merge', 'discard', 'credit', 'stray');

-- A bank that began anew before there was the fact `begun` lost requests that were not done.
INSERT INTO log (step, extractor, kind, origin, op, data)
    SELECT step, extractor, 'forget', origin, 0, '{}' FROM log
    WHERE kind = 'submit' AND origin NOT IN (SELECT id FROM requests)
        AND seq > IFNULL((SELECT CAST(value AS INTEGER) FROM facts WHERE name = 'begun'), 0);

CREATE TABLE snapshots (seq INTEGER PRIMARY KEY);
