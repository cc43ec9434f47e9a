"""Pure arithmetic: from a configuration to a plan."""
