"""Web sites that are not ours: lists of start addresses and instructions, live or from a recording; a judge decides."""
