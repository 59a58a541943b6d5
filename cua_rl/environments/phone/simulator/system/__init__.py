"""The system of the simulated phone: Settings, dialogs, the notification shade."""
