-- From version 3 of the bank to version 4: `schema.sql` says what is there then.
-- No lift was recorded before. The triggers of `units` are made anew after it.

DROP TRIGGER units_insert;
DROP TRIGGER units_update;
DROP TRIGGER units_delete;
ALTER TABLE units ADD COLUMN lift_groups INTEGER NOT NULL DEFAULT 0;
ALTER TABLE units ADD COLUMN lift_mean REAL;
ALTER TABLE units ADD COLUMN lift_m2 REAL NOT NULL DEFAULT 0;
ALTER TABLE units_before ADD COLUMN lift_groups;
ALTER TABLE units_before ADD COLUMN lift_mean;
ALTER TABLE units_before ADD COLUMN lift_m2;
UPDATE units_before SET lift_groups = 0, lift_m2 = 0 WHERE existed;

DROP INDEX log_once;
CREATE UNIQUE INDEX log_once ON log (origin, op, kind)
    WHERE kind IN ('add', 'update', 'return', 'up', 'down', 'drop', 'malformed', 'evict', 'refine', 'chunk', 'merge', 'discard', 'credit',
        'stray', 'lift');
