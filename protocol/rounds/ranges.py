"""Ranges of addresses: who may be one and the same behind many names. Pure.

A provider gives a customer one IPv4 address, or a few out of one /24 where he rents machines; and of IPv6 a /48 to a site, a /56 or /64
to a home. So whoever has one contract has a /24 or a /48 at most, and larger ones cost money. Peers of one home, one office or one
lecture hall share a range, too. What is limited for a range (`admission.range_sessions`, `admission.range_share` of the manifest)
therefore holds for strangers only, and never for those for whom an operator has vouched.

An address of this machine or of a private network says nothing about who it is: labs, containers and tests have no range. All who come
through a relay of somebody else are of one range, for nobody needs that to reach a bootstrap node.
"""

from __future__ import annotations

import ipaddress

RELAYED = "relayed"
_BITS = {4: 24, 6: 48}
"""Of a range, by the version of IP."""


def range_of(where: str) -> str:
    """The range of the multiaddress that somebody comes from; empty where it says nothing about who that is."""
    if "/p2p-circuit" in where:
        return RELAYED
    try:
        host = ipaddress.ip_address(where.split("/")[2])
    except (ValueError, IndexError):
        return ""
    inner = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    host = inner or host
    if not host.is_global:
        return ""
    return str(ipaddress.ip_network((host, _BITS[host.version]), strict=False))
