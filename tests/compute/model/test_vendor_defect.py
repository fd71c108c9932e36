"""The switch that reproduces the vendor's decode defect."""

import torch


def test_token_by_token_the_defect_changes_logits_and_argmax_as_known(tiny, tiny_ids):
    right = tiny.full(tiny.at("wide"), tiny_ids)
    model = tiny.at("wide", vendor_decode_defect=True)
    wrong = tiny.cut(model, tiny_ids, [1] * len(tiny_ids))
    assert abs(float((wrong - right).abs().max()) - 3.8) <= 0.2
    changed = float((wrong.argmax(1) != right.argmax(1)).float().mean())
    assert abs(changed - 0.43) <= 0.03


def test_one_whole_prompt_does_not_show_the_defect(tiny, tiny_ids):
    plain = tiny.full(tiny.at("unrounded"), tiny_ids)
    defect = tiny.full(tiny.at("unrounded", vendor_decode_defect=True), tiny_ids)
    assert torch.equal(plain, defect)


def test_without_the_switch_decode_keeps_to_the_owners_keys(tiny, tiny_ids):
    model = tiny.at("unrounded")
    decode = tiny.cut(model, tiny_ids, [1] * len(tiny_ids))
    assert float((decode - tiny.full(model, tiny_ids)).abs().max()) <= 1e-5
