"""Support for the stand-ins; see README.md one level up."""
