"""Print the environment in which uv downloads as pip is configured to, since uv reads neither pip.conf nor PIP_*: one NAME=VALUE per line.

Run with the Python whose pip counts. Exit with code 1 and a reason if pip's configuration contains what uv cannot follow. With several
indexes, pip takes the best wheel of all, but uv takes a version's wheels from one index, which may lack those with compiled libraries.
"""

import ast
import subprocess
import sys

NAMES = {
    "index-url": "UV_INDEX_URL",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "retries": "UV_HTTP_RETRIES",
    "no-cache-dir": "UV_NO_CACHE",
}
HARMLESS = {
    "break-system-packages", "cache-dir", "config-file", "disable-pip-version-check", "no-color", "no-compile", "no-input", "prefer-binary",
    "no-warn-script-location", "progress-bar", "quiet", "require-virtualenv", "root-user-action", "verbose",
}  # fmt: skip


def main() -> None:
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, encoding="utf-8", check=True).stdout
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}  # later ones override earlier ones, as for pip
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, option = key.rpartition(".")
        if section in sections:
            sections[section][option] = ast.literal_eval(value)
    for option, value in (sections["global"] | sections["install"] | sections[":env:"]).items():
        words = value.split()
        if option not in NAMES.keys() | HARMLESS or (option == "find-links" and "," in value):
            sys.exit(f"pip's option {option} = {value!r} has no counterpart")
        if option in NAMES and words:
            print(f"{NAMES[option]}={(',' if option == 'find-links' else ' ').join(words)}")


if __name__ == "__main__":
    main()
