"""sitsc.commands: one module a command of the command line."""
