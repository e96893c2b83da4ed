import struct

from sglang_morph.demo.timeline import draw_timeline
from tests.sglang_morph.demo.make_run import morph_run, static_run


def test_it_writes_a_png_of_readable_size(tmp_path):
    path = tmp_path / "timeline.png"
    draw_timeline([static_run(), morph_run()], page_bytes=46_080, path=path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 1500 and height >= 900
