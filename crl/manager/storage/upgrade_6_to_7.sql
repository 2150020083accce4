-- From version 6 of the bank to version 7: `schema.sql` says what is there then.
-- Entries did not have the reward of their episode. The triggers of `entries` are made anew after it.

DROP TRIGGER entries_insert;
DROP TRIGGER entries_update;
DROP TRIGGER entries_delete;
ALTER TABLE entries ADD COLUMN reward REAL;
ALTER TABLE entries_before ADD COLUMN reward;
