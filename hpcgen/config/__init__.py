"""What users and admins write, read and checked."""
