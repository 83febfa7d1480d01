"""One example of each kind of plug, named in a configuration as `module:attribute`; docs/extending.md has the recipes."""
