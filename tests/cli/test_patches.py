# SPDX-License-Identifier: Apache-2.0
"""`megatron-ext patches` lists every patch and tells by its exit code whether all would apply."""

import json

from tests.support.distributed import run_ranks


def patches_command(arguments, megatron_version):
    """Run the command in a rank, where Megatron is imported; return its exit code and output."""
    import contextlib
    import io

    from megatron_ext.cli.main import main

    if megatron_version is not None:
        import megatron.core.package_info as info

        info.__version__ = megatron_version
    with (
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        code = main(["patches", *arguments])
    return code, output.getvalue(), errors.getvalue()


def test_check_passes_on_the_installed_megatron():
    ((code, output, _),) = run_ranks(patches_command, 1, ["--check"], None)
    assert code == 0, output
    assert "0 would not apply" in output


def test_json_names_target_reason_and_status_of_every_patch():
    ((code, output, _),) = run_ranks(patches_command, 1, ["--json"], None)
    assert code == 0
    listed = json.loads(output)
    assert len(listed) > 20
    assert all(entry["target"] and entry["reason"] and entry["status"] for entry in listed)
    assert len({entry["name"] for entry in listed}) == len(listed)


def test_check_fails_on_a_megatron_that_was_not_tested():
    ((code, output, _),) = run_ranks(patches_command, 1, ["--check"], "0.21.0+abc")
    assert code == 1
    assert "megatron-core 0.21.0 is installed, tested are >=0.18,<0.21" in output
