//! `dmalane devices`: the devices of this machine.

use std::process::ExitCode;

use clap::Args;
use dmalane::devices::{KINDS, Listed, OptionAbout};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::layout::wrap;
use crate::output;
use crate::probe::Probe;

const EXAMPLES: &str = "\
Examples:
  dmalane devices
  dmalane devices --json | jq -r '.devices[].name'

Exit status: 0 listed, 1 the list cannot be written, 2 usage error.";

/// List the devices that files can be loaded to.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct Devices {
    /// Print the list as JSON
    #[arg(long)]
    json: bool,
}

impl Devices {
    /// Lists the devices.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let devices = list(&Probe::machine());
        let kinds = KINDS.iter().map(|kind| {
            let option = |option: &OptionAbout| {
                json!({ "option": option.key, "value": (!option.value.is_empty()).then_some(option.value),
                    "description": option.about })
            };
            let options: Vec<_> = kind.options().iter().map(option).collect();
            json!({ "kind": kind.name, "syntax": kind.syntax, "description": kind.about, "options": options })
        });
        let (found, kinds): (Vec<_>, Vec<_>) = (devices.iter().map(json).collect(), kinds.collect());
        let all = || json!({ "schema": 1, "command": "devices", "devices": found, "kinds": kinds });
        output::tell(self.json, all, || text(&devices))
    }
}

/// The devices, each with the name of its kind.
fn list(probe: &Probe) -> Vec<(&'static str, Listed)> {
    let root = probe.place("/");
    KINDS.iter().flat_map(|kind| kind.list(&root).into_iter().map(|device| (kind.name, device))).collect()
}

fn json((kind, device): &(&str, Listed)) -> Value {
    let Listed { name, supported, about, facts } = device;
    let mut all = json!({ "name": name, "supported": supported, "description": about, "kind": kind });
    facts.iter().for_each(|(key, value)| all[*key] = json!(value));
    all
}

fn text(devices: &[(&str, Listed)]) -> String {
    let mut text = String::new();
    for (_, Listed { name, about, facts, .. }) in devices {
        text += &format!("{name}\n{}", wrap(&format!("    {about}"), 4));
        let fact = |(key, value): &(&str, Option<String>)| {
            format!("{} {}", key.replace('_', " "), value.as_deref().unwrap_or("none"))
        };
        let facts: Vec<_> = facts.iter().map(fact).collect();
        if !facts.is_empty() {
            text += &wrap(&format!("    {}", facts.join(", ")), 4);
        }
    }
    text += "\nEvery kind, as -d names it, and options that may follow, in any order:\n";
    let width = KINDS.iter().map(|kind| kind.syntax.len()).max().unwrap_or(0);
    for kind in KINDS {
        text += &wrap(&format!("    {:<width$} {}", kind.syntax, kind.about), width + 5);
        for option in kind.options() {
            let (comma, about) = (format!("  ,{option}"), option.about);
            text += &wrap(&format!("    {comma:<width$} {about}"), width + 5);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use dmalane::daemon::{self, SOCKET};
    use std::fs;
    use std::os::fd::AsFd;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::thread;

    #[test]
    fn every_kind_has_its_description_in_the_same_column() {
        let text = text(&[]);
        let columns: std::collections::BTreeSet<_> = KINDS
            .iter()
            .map(|kind| {
                let line = text.lines().find(|line| line.trim_start().starts_with(&format!("{} ", kind.syntax)));
                line.and_then(|line| line.find(&kind.about[..10]))
            })
            .collect();
        assert!(columns.len() == 1 && !columns.contains(&None), "{text}");
    }

    #[test]
    fn the_software_card_is_always_there_and_vfio_devices_are_marked() {
        let root = tempfile::tempdir().unwrap();
        let probe = Probe::new(root.path());
        assert_eq!(list(&probe).len(), 1);

        for (bdf, driver, id) in [
            ("0000:01:00.0", "vfio-pci", "0x50b4\n"),
            ("0000:02:00.0", "nvme", "0x50b4\n"),
            ("0000:03:00.0", "vfio-pci", "?"),
        ] {
            let dir = root.path().join("sys/bus/pci/devices").join(bdf);
            fs::create_dir_all(&dir).unwrap();
            for (file, content) in [("vendor", "0x10ee\n"), ("device", id)] {
                fs::write(dir.join(file), content).unwrap();
            }
            symlink(format!("../../../bus/pci/drivers/{driver}"), dir.join("driver")).unwrap();
            symlink("../../../kernel/iommu_groups/15", dir.join("iommu_group")).unwrap();
        }
        let devices = list(&probe);
        assert_eq!(devices.len(), 2, "not the one of another driver, not the one with a bad number");
        let text = text(&devices);
        assert!(text.contains("soft\n") && text.contains("ddr 64 GiB, hbm 32 GiB") && text.contains("channels 2"));
        assert!(text.contains(
            "vfio:0000:01:00.0\n    a PCI device bound to vfio-pci, but not a dmalane card; `dmalane bar-map` maps \
            its BARs\n    pci id 10ee:50b4, iommu group 15\n"
        ));
        let socket = root.path().join(SOCKET.trim_start_matches('/'));
        fs::create_dir_all(socket.parent().unwrap()).unwrap();
        let daemon = |supported: bool| {
            let daemon = json(&list(&probe)[1]);
            assert_eq!((&daemon["kind"], &daemon["supported"]), (&"daemon".into(), &supported.into()), "{daemon}");
            assert_eq!(daemon["name"], "daemon:/run/dmalane/dmalaned.sock");
            daemon["description"].as_str().unwrap().to_owned()
        };
        fs::write(&socket, "").unwrap();
        assert!(daemon(false).contains("Connection refused"));
        fs::remove_file(&socket).unwrap();
        // As a daemon that was killed leaves it.
        drop(UnixListener::bind(&socket).unwrap());
        assert!(daemon(false).contains("Connection refused"));
        fs::remove_file(&socket).unwrap();
        let listener = daemon::Listener::bind(&socket, 0o600, false).unwrap();
        let server = daemon::Server::new(daemon::Config::default(), |_| {}).unwrap();
        let (stop, stopped) = UnixStream::pair().unwrap();
        let server = thread::spawn(move || server.run(listener, stopped.as_fd()).unwrap());
        assert!(daemon(true).contains("`dmalaned status`"));
        drop(stop);
        server.join().unwrap();
        assert_eq!(list(&probe).len(), 2, "one that ends takes its socket along");
        let ours = root.path().join("sys/bus/pci/devices/0000:01:00.0");
        fs::write(ours.join("vendor"), "0x4c44\n").unwrap();
        fs::write(ours.join("device"), "0x0001\n").unwrap();
        let (_, card) = list(&probe).pop().unwrap();
        assert_eq!((card.name.as_str(), card.supported), ("vfio:0000:01:00.0", true));
        let json = json(&devices[1]);
        assert_eq!(json["kind"], "vfio");
        assert_eq!((&json["supported"], &json["iommu_group"]), (&false.into(), &"15".into()));
    }
}
