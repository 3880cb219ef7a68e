"""Logs of `tvm.auto_scheduler` (Ansor, TenSet): `log` reads them, `importing` stores what they hold."""
