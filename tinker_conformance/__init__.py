"""A conformance suite for servers of the tinker SDK: `python -m tinker_conformance --base-url ...`; see README.md."""
