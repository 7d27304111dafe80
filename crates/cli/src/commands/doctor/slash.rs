//! Checks of an Alveo V80 under SLASH: its driver, the driver's nodes and its daemon.
//!
//! Names and numbers are those of SLASH's branch `dev` at 6a4cc11e (`driver/slash_config.h`, `vrt/vrtd/systemd`).

use dmalane::pci;

use super::check::{Check, Subject};
use super::hardware::{list, load, open_up};
use crate::probe::{NodeState, Probe};

/// The PCI functions that the driver binds: of the QDMA, then of the control BARs.
pub const PCI_IDS: [&str; 5] = ["10ee:50c1", "10ee:50b5", "10ee:50bd", "10ee:50c2", "10ee:50b6"];
/// The daemon's socket.
pub const VRTD: &str = "/run/vrtd.sock";

/// The driver's nodes: of the QDMA of each card, and of its control BARs.
fn nodes(probe: &Probe) -> Vec<String> {
    let is_node = |name: &String| {
        let number = name.strip_prefix("slash_qdma_ctl").or_else(|| name.strip_prefix("slash_ctl"));
        number.is_some_and(|n| !n.is_empty() && n.chars().all(|c| c.is_ascii_digit()))
    };
    probe.names("/dev").into_iter().filter(is_node).map(|name| format!("/dev/{name}")).collect()
}

/// The cards' functions on the PCI bus.
fn functions(probe: &Probe) -> Vec<String> {
    let cards = pci::devices(&probe.place("/")).into_iter().filter(|d| PCI_IDS.contains(&d.id.as_str()));
    cards.map(|d| format!("{} ({}, driver {})", d.bdf, d.id, d.driver.as_deref().unwrap_or("none"))).collect()
}

fn module(probe: &Probe) -> Option<String> {
    let there = probe.place("/sys/module/slash").is_dir();
    there.then(|| probe.text("/sys/module/slash/version").unwrap_or_else(|| "of no version".to_owned()))
}

/// The driver and its nodes.
pub fn driver(probe: &Probe) -> Check {
    let subject = Subject::for_real_devices("slash", "drives an Alveo V80 through the nodes of AMD's driver");
    let (nodes, functions, module) = (nodes(probe), functions(probe), module(probe));
    let about = match &module {
        Some(version) => format!("module slash {version}"),
        None => "module slash is not loaded".to_owned(),
    };
    if nodes.is_empty() {
        return match (functions.is_empty(), &module) {
            (true, None) => subject.note("no V80 (PCI 10ee:50c1) and no /dev/slash_qdma_ctlN"),
            (true, Some(_)) => {
                subject.missing(format!("{about}, no V80 on the PCI bus"), "echo 1 | sudo tee /sys/bus/pci/rescan")
            }
            (false, None) => subject.missing(format!("{}; {about}", list(&functions)), load(probe, "slash")),
            (false, Some(_)) => subject.missing(
                format!("{}; {about}, but there is no /dev/slash_qdma_ctlN", list(&functions)),
                "sudo dmesg | grep slash    # says why the driver did not take the card",
            ),
        };
    }
    let numbers = |prefix: &str| -> Vec<String> {
        nodes.iter().filter_map(|node| node.strip_prefix("/dev/")?.strip_prefix(prefix)).map(str::to_owned).collect()
    };
    let (queues, controls) = (numbers("slash_qdma_ctl"), numbers("slash_ctl"));
    if let Some(card) = controls.iter().find(|n| !queues.contains(n)) {
        return subject.missing(
            format!("{}; {about}; card {card} has no /dev/slash_qdma_ctl{card}", list(&nodes)),
            "sudo dmesg | grep slash_qdma    # says why the driver did not take the QDMA",
        );
    }
    let closed: Vec<_> = nodes.iter().filter(|node| probe.node(node) != NodeState::Open).cloned().collect();
    match closed.is_empty() {
        true => subject.ok(format!("{}; {about}", list(&nodes))),
        false => subject.missing(
            format!("{}; {about}; closed to this user: {}", list(&nodes), list(&closed)),
            open_up(&closed.join(" ")),
        ),
    }
}

/// The daemon that lends the card.
pub fn daemon(probe: &Probe) -> Check {
    let subject = Subject::for_real_devices("vrtd", "lends an Alveo V80 to users who may not open the driver's nodes");
    let used = !nodes(probe).is_empty() || !functions(probe).is_empty() || module(probe).is_some();
    match probe.node(VRTD) {
        NodeState::Open => subject.ok(VRTD),
        NodeState::Closed => subject
            .missing(format!("{VRTD} is closed to this user"), "sudo usermod -aG vrt $USER    # and log in again"),
        NodeState::Missing if used => subject.missing(format!("no {VRTD}"), "sudo systemctl enable --now vrtd.socket"),
        NodeState::Missing => subject.note(format!("no {VRTD}, and no V80")),
    }
}
