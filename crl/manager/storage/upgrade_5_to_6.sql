-- From version 5 of the bank to version 6: `schema.sql` says what is there then.
-- Entries were not told apart by the variation of their task. The triggers of `entries` are made anew after it.

DROP TRIGGER entries_insert;
DROP TRIGGER entries_update;
DROP TRIGGER entries_delete;
ALTER TABLE entries ADD COLUMN variation TEXT NOT NULL DEFAULT '';
ALTER TABLE entries_before ADD COLUMN variation;
UPDATE entries_before SET variation = '' WHERE existed;
