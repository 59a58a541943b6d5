"""GBox: Android and Linux boxes in the cloud (or self-hosted), through the asynchronous client of gbox-sdk."""
