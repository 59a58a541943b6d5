"""The admin pages of a Django site, as a bigger site than MiniWoB++: lists, forms, searches, confirmations."""
