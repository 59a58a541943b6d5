from tests.real.database.conftest import server_url, url

__all__ = ["server_url", "url"]
