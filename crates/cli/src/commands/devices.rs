//! `dmalane devices`: the devices of this machine.

use std::process::ExitCode;

use clap::Args;
use dmalane::CARD_PCI_ID;
use dmalane::daemon::{self, SOCKET};
use serde::Serialize;

use crate::device::{CARD_DDR, CARD_HBM};
use crate::failure::Failure;
use crate::probe::Probe;
use crate::{output, pci, size};

const EXAMPLES: &str = "\
Examples:
  dmalane devices
  dmalane devices --json | jq -r '.devices[].name'";

/// List the devices that files can be loaded to.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub struct Devices {
    /// Print the list as JSON
    #[arg(long)]
    json: bool,
}

impl Devices {
    /// Lists the devices.
    pub fn run(self) -> Result<ExitCode, Failure> {
        let listing = Listing { schema: 1, command: "devices", devices: list(&Probe::machine()) };
        if self.json {
            output::print_json(&listing)?;
        } else {
            output::print(&text(&listing.devices))?;
        }
        Ok(ExitCode::SUCCESS)
    }
}

#[derive(Serialize)]
struct Listing {
    schema: u32,
    command: &'static str,
    devices: Vec<Device>,
}

#[derive(Serialize)]
struct Device {
    name: String,
    supported: bool,
    description: String,
    #[serde(flatten)]
    kind: Kind,
}

#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Kind {
    SoftCard { memories: Vec<Memory>, channels: u32 },
    Daemon,
    VfioPci { pci_id: String, iommu_group: Option<String> },
}

#[derive(Serialize)]
struct Memory {
    name: &'static str,
    default_bytes: u64,
}

fn list(probe: &Probe) -> Vec<Device> {
    let soft = Device {
        name: "soft".to_owned(),
        supported: true,
        description: "the software card: a device model inside this process, no hardware needed".to_owned(),
        kind: Kind::SoftCard {
            memories: vec![
                Memory { name: "ddr", default_bytes: CARD_DDR.bytes() },
                Memory { name: "hbm", default_bytes: CARD_HBM.bytes() },
            ],
            channels: 2,
        },
    };
    let bound = pci::devices(probe).into_iter().filter(|d| d.driver.as_deref() == Some("vfio-pci"));
    let (vendor, device) = CARD_PCI_ID;
    let card = format!("{vendor:04x}:{device:04x}");
    let hardware = bound.map(|d| Device {
        name: format!("vfio:{}", d.bdf),
        supported: d.id == card,
        description: match d.id == card {
            true => "a card bound to vfio-pci".to_owned(),
            false => {
                "a PCI device bound to vfio-pci, but not a dmalane card; `dmalane bar-map` maps its BARs".to_owned()
            }
        },
        kind: Kind::VfioPci { pci_id: d.id, iommu_group: d.iommu_group },
    });
    let socket = Some(probe.place(SOCKET)).filter(|socket| socket.exists()).map(|socket| {
        // A file may be there without a daemon: one that was killed leaves its socket.
        let answer = daemon::status(&socket);
        Device {
            name: format!("daemon:{SOCKET}"),
            supported: answer.is_ok(),
            description: match answer {
                Ok(_) => "a share of a dmalaned's card; `dmalaned status` shows its clients".to_owned(),
                Err(e) => format!("the daemon cannot be used: {e}"),
            },
            kind: Kind::Daemon,
        }
    });
    std::iter::once(soft).chain(socket).chain(hardware).collect()
}

fn text(devices: &[Device]) -> String {
    let mut text = String::new();
    for device in devices {
        text += &format!("{}\n    {}\n", device.name, device.description);
        text += &match &device.kind {
            Kind::SoftCard { memories, channels } => {
                let sizes: Vec<_> =
                    memories.iter().map(|m| format!("{} {}", m.name, size::binary(m.default_bytes))).collect();
                format!(
                    "    memories {} (allocated as they fill; --card-ddr and --card-hbm set the sizes), {channels} \
                    channels\n",
                    sizes.join(", ")
                )
            }
            Kind::Daemon => String::new(),
            Kind::VfioPci { pci_id, iommu_group } => {
                format!("    id {pci_id}, IOMMU group {}\n", iommu_group.as_deref().unwrap_or("none"))
            }
        };
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::fd::AsFd;
    use std::os::unix::fs::symlink;
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::thread;

    #[test]
    fn the_software_card_is_always_there_and_vfio_devices_are_marked() {
        let root = tempfile::tempdir().unwrap();
        let probe = Probe::new(root.path());
        assert_eq!(list(&probe).len(), 1);

        for (bdf, driver, class) in [
            ("0000:01:00.0", "vfio-pci", "0x120000"),
            ("0000:02:00.0", "nvme", "0x010802"),
            ("0000:03:00.0", "vfio-pci", "?"),
        ] {
            let dir = root.path().join("sys/bus/pci/devices").join(bdf);
            fs::create_dir_all(&dir).unwrap();
            for (file, content) in [("vendor", "0x10ee\n"), ("device", "0x50b4\n"), ("class", class)] {
                fs::write(dir.join(file), content).unwrap();
            }
            symlink(format!("../../../bus/pci/drivers/{driver}"), dir.join("driver")).unwrap();
            symlink("../../../kernel/iommu_groups/15", dir.join("iommu_group")).unwrap();
        }
        let devices = list(&probe);
        assert_eq!(devices.len(), 2, "not the one of another driver, not the one with a bad class");
        let text = text(&devices);
        assert!(text.contains("soft\n") && text.contains("ddr 64 GiB, hbm 32 GiB") && text.contains("2 channels"));
        assert!(text.contains(
            "vfio:0000:01:00.0\n    a PCI device bound to vfio-pci, but not a dmalane card; `dmalane bar-map` maps \
            its BARs\n    id 10ee:50b4, IOMMU group 15\n"
        ));
        let socket = root.path().join(SOCKET.trim_start_matches('/'));
        fs::create_dir_all(socket.parent().unwrap()).unwrap();
        let daemon = |supported: bool| {
            let daemon = serde_json::to_value(&list(&probe)[1]).unwrap();
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
        let listener = daemon::Listener::bind(&socket, 0o600).unwrap();
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
        let card = list(&probe).pop().unwrap();
        assert_eq!((card.name.as_str(), card.supported), ("vfio:0000:01:00.0", true));
        let json = serde_json::to_value(&devices[1]).unwrap();
        assert_eq!(json["kind"], "vfio_pci");
        assert_eq!((&json["supported"], &json["iommu_group"]), (&false.into(), &"15".into()));
    }
}
