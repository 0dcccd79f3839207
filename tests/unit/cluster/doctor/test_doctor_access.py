from __future__ import annotations

from argusrl.cluster.doctor.access import NEEDED, WANTED
from argusrl.cluster.manifests.rights import USER, USER_CLUSTER


def test_the_role_for_users_grants_every_right_that_the_doctor_asks_for() -> None:
    granted = {
        (verb, right.group, resource)
        for right in (*USER, *USER_CLUSTER)
        for resource in right.resources
        for verb in right.verbs
    }
    asked = {
        (verb, kind.group, f"{kind.plural}/{sub}" if sub else kind.plural)
        for rights in (*NEEDED.values(), *WANTED.values())
        for verb, kind, sub in rights
    }
    assert asked <= granted
