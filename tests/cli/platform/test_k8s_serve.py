"""`springtide k8s serve` says what is wrong with its settings before it does anything."""

from __future__ import annotations


def test_serve_needs_settings_that_it_can_read(springtide, tmp_path):
    assert springtide("k8s", "serve").exit_code == 2
    missing = springtide("k8s", "serve", "--settings", str(tmp_path / "nowhere.yaml"))
    assert missing.exit_code == 2
    assert "cannot be read" in missing.output
    (tmp_path / "s.yaml").write_text("store_url: ''\n")
    without = springtide("k8s", "serve", "--settings", str(tmp_path / "s.yaml"))
    assert without.exit_code == 2
    assert "store_url must name the object store" in without.output
    assert "Exit codes: 0 ended in order" in springtide("k8s", "serve", "--help").output
