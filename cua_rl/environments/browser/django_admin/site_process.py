# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
"""The site's process, which imports none of our modules: `python site_process.py DATABASE ADMINISTRATOR [PORT]`.

Without a port, it makes the database, a file in HOME, with the administrator. With one, it answers there. The database
may be replaced between requests: every request opens it again.
"""

import sys
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server
from wsgiref.types import WSGIApplication

import django
from django.conf import settings
from django.http import HttpRequest, HttpResponseRedirect
from django.urls import URLPattern, URLResolver, path

_APPS = ("admin", "auth", "contenttypes", "sessions", "messages", "staticfiles")
_MIDDLEWARE = (
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
)
_PROCESSORS = (
    "django.template.context_processors.request",
    "django.contrib.auth.context_processors.auth",
    "django.contrib.messages.context_processors.messages",
)
urlpatterns: list[URLPattern | URLResolver] = []


def main(database: str, administrator: str, port: str | None = None) -> None:
    """Make the database, or serve the site until the process is ended."""
    _configure(Path.home() / database)
    # these need the settings
    from django.contrib import admin
    from django.contrib.auth.models import User
    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.core.handlers.wsgi import WSGIHandler
    from django.core.management import call_command

    if port is None:
        call_command("migrate", verbosity=0)
        User.objects.create_superuser(administrator)
        return
    urlpatterns.extend([path("enter/", _enter, {"name": administrator}), path("admin/", admin.site.urls)])
    application = cast(WSGIApplication, StaticFilesHandler(WSGIHandler()))
    with make_server("127.0.0.1", int(port), application, server_class=_Server, handler_class=_Quiet) as server:
        server.serve_forever()


def _configure(database: Path) -> None:
    """Django's settings; nothing here is secret, the site ends with its run and answers only this machine."""
    template = {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {"context_processors": list(_PROCESSORS)},
    }
    settings.configure(
        ALLOWED_HOSTS=["127.0.0.1"],
        AUTH_PASSWORD_VALIDATORS=[],
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": database}},
        DEFAULT_AUTO_FIELD="django.db.models.AutoField",
        INSTALLED_APPS=[f"django.contrib.{app}" for app in _APPS],
        MIDDLEWARE=list(_MIDDLEWARE),
        PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],  # a slow hash would protect nothing here
        ROOT_URLCONF=__name__,
        SECRET_KEY="served to this machine only",
        STATIC_URL="/static/",
        TEMPLATES=[template],
        USE_TZ=True,
    )
    django.setup()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None: ...


def _enter(request: HttpRequest, name: str) -> HttpResponseRedirect:
    """Log in as the administrator, without a password."""
    from django.contrib.auth import login
    from django.contrib.auth.models import User

    login(request, User.objects.get(username=name), backend="django.contrib.auth.backends.ModelBackend")
    return HttpResponseRedirect("/admin/")


if __name__ == "__main__":
    main(*sys.argv[1:])
