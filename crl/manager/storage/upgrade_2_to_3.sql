-- From version 2 of the bank to version 3: `schema.sql` says what is there then. The triggers of `units` are made anew after it.

DROP TRIGGER units_insert;
DROP TRIGGER units_update;
DROP TRIGGER units_delete;
ALTER TABLE units ADD COLUMN votes INTEGER NOT NULL DEFAULT 0;
ALTER TABLE units_before ADD COLUMN votes;
UPDATE units_before SET votes = 0 WHERE existed;

CREATE INDEX entries_written ON entries (written) WHERE status = 'active';

DROP INDEX log_once;
CREATE UNIQUE INDEX log_once ON log (origin, op, kind)
    WHERE kind IN ('add', 'update', 'return', 'up', 'down', 'drop', 'malformed', 'evict', 'refine', 'chunk', 'merge', 'discard', 'credit',
        'stray');
