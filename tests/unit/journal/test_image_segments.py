from dataclasses import replace

import pytest

from argusrl.errors import CorruptionError
from argusrl.journal.images import ImageWriter, read_image
from argusrl.journal.records import ImageIndex, decode_record
from argusrl.journal.segments import read_segment
from fakes.run_folder import image


def test_content_is_written_once_and_indexed(run):
    writer = ImageWriter(run, 2, 1, "w0")
    refs = [writer.add(image(0)), writer.add(image(1)), writer.add(image(0))]
    assert refs[0] == refs[2] != refs[1]
    assert writer.find(image(1).sha256) == refs[1]
    assert writer.find("unknown") is None
    sealed = writer.seal()
    assert sealed == writer.seal()
    assert sealed.records == 3
    assert refs[0].segment == "images/000002/w0.e0001.seg"
    assert [read_image(run, ref) for ref in refs[:2]] == [image(0).data, image(1).data]
    records = [
        decode_record(payload) for _, payload in read_segment(run.absolute(refs[0].segment), require_sealed=True)
    ]
    assert records[-1] == ImageIndex(images=(refs[0], refs[1]))


def test_without_images_there_is_no_segment(run):
    writer = ImageWriter(run, 2, 1, "w0")
    writer.sync()
    assert writer.seal() is None
    writer.abandon()
    assert not run.images(2).exists()


def test_an_image_is_never_taken_for_another(run):
    writer = ImageWriter(run, 2, 1, "w0")
    one, other = writer.add(image(0)), writer.add(image(1))
    writer.seal()
    with pytest.raises(CorruptionError, match=other.sha256):
        read_image(run, replace(one, sha256=other.sha256))
