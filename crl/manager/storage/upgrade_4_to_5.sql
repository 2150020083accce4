-- From version 4 of the bank to version 5: `schema.sql` says what is there then.
-- No answer was sampled with top-p or top-k before. The triggers of `generations` are made anew after it.

DROP TRIGGER generations_insert;
DROP TRIGGER generations_update;
DROP TRIGGER generations_delete;
ALTER TABLE generations ADD COLUMN kept BLOB;
ALTER TABLE generations ADD COLUMN kept_counts BLOB;
ALTER TABLE generations_before ADD COLUMN kept;
ALTER TABLE generations_before ADD COLUMN kept_counts;
