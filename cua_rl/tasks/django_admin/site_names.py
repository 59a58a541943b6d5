"""Names that the site's process and its owner share."""

ADMINISTRATOR = "admin"
DATABASE = "db.sqlite3"
PORT = "port"
