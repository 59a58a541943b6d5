"""Android through a shell, on phones and in boxes: its state, preparing it for a task, tasks in folders."""
