"""Real Android phones over adb."""
