#!/usr/bin/env bash
# A Chromium for tests/browser: the one there is, else the distribution's (as root, with apt), else Playwright's own.
# Says what it did. Never fails: a test without its browser is skipped and names the way out.
set -u
cd "$(dirname "$0")/../.."
found() { .venv/bin/python -m tests.browser.mlflow_pages 2>/dev/null; }
found && exit 0
echo "no Chromium here, installing one for the test that rolls back in MLflow's page"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  { timeout 300 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 900 apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1
  found && exit 0
fi
timeout 900 .venv/bin/playwright install chromium >/dev/null 2>&1
found || echo "that did not work; by hand: apt-get install chromium, or .venv/bin/playwright install chromium"
exit 0
