from __future__ import annotations

import pytest

from hpcgen.errors import HpcgenError
from hpcgen.topology import markup, nccl_xml

BOMB = """\
<!DOCTYPE system [
  <!ENTITY a "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa">
  <!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">
  <!ENTITY c "&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;&b;">
]>
<system version="1">&c;</system>
"""
OUTSIDE = '<!DOCTYPE system [<!ENTITY x SYSTEM "file:///etc/passwd">]>\n<system version="1">&x;</system>\n'
CPU = '<system version="1">\n<cpu numaid="0" affinity="ff">{}</cpu></system>'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (BOMB, r":1: document type declarations are not allowed"),
        (OUTSIDE, r":1: document type declarations are not allowed"),
        ("", r":1: not XML: no element found"),
        ("NCCL_TOPO_FILE=x", r":1: not XML: "),
        ("<system version='1'>\n<cpu>\n</system>", r":3: not XML: mismatched tag"),
        ("<system/><system/>", r":1: not XML: junk after document element"),
        ("<system>&undefined;</system>", r":1: not XML: undefined entity"),
        ('<?xml version="1.0" encoding="no-such"?><system/>', r"not XML: unknown encoding"),
        ("<a>" * 40 + "</a>" * 40, r":1: nested too deeply \(at most 32 levels\)"),
        ("\0\0\0", r":1: not XML"),
        ("<graphs version='1'/>", r":1: not an NCCL topology file: it starts with <graphs version='1'>"),
        ("<system/>", r"it starts with <system version=None>; expected <system version=\"1\">"),
        ("<system version='2'/>", r"it starts with <system version='2'>"),
        ("<system version='1'>\n<cpu/></system>", r":2: <cpu> has no numaid"),
        ("<system version='1'><cpu numaid='x'/></system>", r":1: numaid = 'x' is not an integer"),
        (
            "<system version='1'><cpu numaid='0' affinity='0xff'/></system>",
            r"affinity = '0xff' is not a CPU mask",
        ),
        (CPU.format('<pci class="0x030200"/>'), r":2: busid = '' is not a PCI address"),
        (CPU.format('<pci busid="0:0" class="0x020700"/>'), r"busid = '0:0' is not a PCI address"),
        (
            CPU.format('<pci busid="0001:00:00.0" class="0x03" link_width="x"/>'),
            r"link_width = 'x' is not an integer",
        ),
        (
            CPU.format('<pci busid="0001:00:00.0" class="0x03"/>' * 2),
            "duplicate busid 0001:00:00.0",
        ),
        (
            "<system version='1'>" + "<cpu numaid='0'/>" * 2 + "</system>",
            "duplicate numaid 0",
        ),
    ],
)
def test_a_file_that_is_not_a_topology_file(tmp_path, content, said):
    path = tmp_path / "t.xml"
    path.write_text(content)
    with pytest.raises(HpcgenError, match=said) as raised:
        nccl_xml.read(path)
    assert str(raised.value).startswith(f"{path}:")
    assert "aaaa" not in str(raised.value)


def test_a_huge_file_is_not_read(tmp_path):
    path = tmp_path / "t.xml"
    path.write_bytes(b" " * (markup.MAX_BYTES + 1))
    with pytest.raises(HpcgenError, match="bytes exceed the maximum of a topology file"):
        markup.read(path)


def test_a_huge_mask_is_refused_quickly(tmp_path):
    path = tmp_path / "t.xml"
    path.write_text(f'<system version="1"><cpu numaid="0" affinity="{"ffffffff," * 100_000}f"/></system>')
    with pytest.raises(HpcgenError, match="is not a CPU mask") as raised:
        nccl_xml.read(path)
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("name", ["nothing.xml", "."])
def test_files_that_cannot_be_read(tmp_path, name):
    with pytest.raises(HpcgenError, match=r"no such file|not a regular file"):
        markup.read(tmp_path / name)


def test_elements_know_their_line():
    root = markup.parse(b'<a>\n<b c="1"/>\n text <b/></a>', "x")
    assert [(child.line, child.attributes) for child in root.all("b")] == [(2, {"c": "1"}), (3, {})]
