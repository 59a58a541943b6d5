"""Real Android phones over adb: operating them, reading their state, preparing them for a task."""
