#!/usr/bin/env bash
# Two "nodes" on one machine: the network namespaces NAME-0 and NAME-1, joined by a pair of virtual cables and by nothing else.
#
#   namespaces.sh up NAME     makes both, and prints the address of each; makes nothing if it can not make all
#   namespaces.sh down NAME   ends what still runs in them, and removes all of it; does nothing where there is nothing
#
# Both ends are made inside the namespaces, so that two runs with names of their own share no address and no name of an interface.
set -euo pipefail
PATH="$PATH:/usr/sbin:/sbin"

down() {
    local node
    for node in "$1-0" "$1-1"; do
        if [ -e "/run/netns/$node" ]; then
            ip netns pids "$node" | xargs --no-run-if-empty kill -KILL 2>/dev/null || true
            ip netns delete "$node"
        fi
    done
}

up() {
    local number
    if [ -e "/run/netns/$1-0" ] || [ -e "/run/netns/$1-1" ]; then
        echo "$1 is there already" >&2
        exit 1
    fi
    trap 'down "$1"' ERR
    ip netns add "$1-0"
    ip netns add "$1-1"
    ip -netns "$1-0" link add cable type veth peer name cable netns "$1-1"
    for number in 0 1; do
        ip -netns "$1-$number" address add "10.77.0.$((number + 1))/24" dev cable
        ip -netns "$1-$number" link set cable up
        ip -netns "$1-$number" link set lo up
        echo "10.77.0.$((number + 1))"
    done
    trap - ERR
}

case "${1:-}" in
    up | down) "$1" "${2:?a name}" ;;
    *) echo "usage: $0 up|down NAME" >&2; exit 2 ;;
esac
