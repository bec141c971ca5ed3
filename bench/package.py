"""Downloads one file of a package from the Python package index and checks it against its hash.

Usage: package.py PACKAGE FILE SHA256 TARGET; with `-` for SHA256 the hash that the index states is the one that counts.
"""

import hashlib
import html.parser
import os
import pathlib
import subprocess
import sys
import urllib.parse
import urllib.request

from pip._internal.models.index import PyPI


def index() -> str:
    """The index that pip is set to, or its own."""
    configured = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True)
    return os.environ.get("PIP_INDEX_URL") or configured.stdout.strip() or PyPI.simple_url


class Links(html.parser.HTMLParser):
    """The addresses of an index page."""

    def __init__(self):
        super().__init__()
        self.addresses = []

    def handle_starttag(self, tag, attributes):
        if tag == "a":
            self.addresses.append(dict(attributes)["href"])


def main(package: str, file: str, sha256: str, target: str) -> None:
    page = f"{index().rstrip('/')}/{package}/"
    links = Links()
    links.feed(urllib.request.urlopen(page, timeout=60).read().decode())
    for address in links.addresses:
        address, fragment = urllib.parse.urldefrag(urllib.parse.urljoin(page, address))
        if address.rsplit("/", 1)[-1] == file:
            break
    else:
        sys.exit(f"{package} has no file {file} on the index")
    content = urllib.request.urlopen(address, timeout=600).read()
    wanted = fragment.removeprefix("sha256=") if sha256 == "-" else sha256
    found = hashlib.sha256(content).hexdigest()
    if found != wanted:
        sys.exit(f"{file} has sha256 {found}, expected {wanted}")
    partial = pathlib.Path(target + ".partial")
    partial.write_bytes(content)
    partial.rename(target)


if __name__ == "__main__":
    main(*sys.argv[1:])
