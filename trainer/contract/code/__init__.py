"""The user's own functions: how they are named, read, hashed and loaded."""
