"""The files that users and admins write: types, loading and validation."""
