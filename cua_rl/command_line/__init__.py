"""From a command line or a YAML file to a configuration, and the frame that runs a recipe with it."""
