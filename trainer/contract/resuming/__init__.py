"""What a resumed run may change, and the records that this is decided from."""
