"""The changes that a resumed run may make, and the records that decide it."""
