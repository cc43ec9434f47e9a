"""From a plan and the templates to the text of a script; nothing here writes a file or runs a command."""
