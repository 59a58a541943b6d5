"""The admin pages of a Django site: lists, forms, searches and confirmations, a larger site than MiniWoB++ pages."""
