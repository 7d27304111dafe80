//! Machines that are good, empty and hostile.

use std::fs;
use std::os::unix::fs::symlink;

use tempfile::TempDir;

use super::check::changes;
use super::*;

/// A machine that has these files.
fn machine(files: &[(&str, &[u8])]) -> (TempDir, Probe) {
    let root = tempfile::tempdir().unwrap();
    for (path, content) in files {
        let path = root.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
    }
    let probe = Probe::new(root.path());
    (root, probe)
}

const POOL: &str = "sys/kernel/mm/hugepages/hugepages-2048kB";

fn good() -> Vec<(&'static str, &'static [u8])> {
    vec![
        ("proc/sys/kernel/osrelease", b"6.12.3-amd64\n"),
        ("proc/self/status", b"Name:\tdmalane\nCapEff:\t0000000000000000\nCpus_allowed_list:\t0-3,8\n"),
        (
            "proc/self/limits",
            b"Limit  Soft Limit  Hard Limit  Units\nMax locked memory         unlimited            \
                               unlimited            bytes\n",
        ),
        ("proc/self/cgroup", b"0::/user/session\n"),
        ("proc/meminfo", b"MemTotal:       16314408 kB\nMemFree: 1 kB\nMemAvailable:   12000000 kB\n"),
        ("proc/cpuinfo", b"processor\t: 0\nvendor_id\t: GenuineIntel\n"),
        ("sys/fs/cgroup/user/session/memory.max", b"max\n"),
        ("sys/fs/cgroup/user/memory.max", b"4294967296\n"),
        ("sys/fs/cgroup/user/memory.current", b"1073741824\n"),
        ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", b"64\n"),
        ("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", b"60\n"),
        ("sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", b"2\n"),
        ("sys/kernel/mm/transparent_hugepage/enabled", b"always [madvise] never\n"),
        ("sys/kernel/mm/transparent_hugepage/shmem_enabled", b"always within_size [advise] never deny force\n"),
        ("sys/kernel/iommu_groups/0/x", b""),
        ("sys/kernel/iommu_groups/1/x", b""),
        ("dev/dma_heap/system", b""),
        ("dev/udmabuf", b""),
        ("dev/vfio/vfio", b""),
        ("dev/iommu", b""),
        (
            "lib/modules/6.12.3-amd64/modules.dep",
            b"kernel/drivers/vfio/pci/vfio-pci.ko.xz: kernel/drivers/vfio/vfio.ko.xz\n",
        ),
        ("sys/bus/pci/devices/0000:01:00.0/class", b"0x030200\n"),
        ("sys/bus/pci/devices/0000:01:00.0/vendor", b"0x10de\n"),
        ("sys/bus/pci/devices/0000:01:00.0/device", b"0x2204\n"),
    ]
}

fn look(probe: &Probe) -> Report {
    report(probe, &std::env::temp_dir()).unwrap_or_else(|_| panic!("the temporary directory is there"))
}

fn find<'a>(report: &'a Report, name: &str) -> &'a Check {
    report.checks.iter().find(|c| c.name == name).unwrap()
}

/// Checks that hold for every report.
fn consistent(report: &Report) {
    for check in &report.checks {
        match (check.status, check.real_devices) {
            (Status::Missing, real) => assert!(check.fix.is_some() && !real, "{check:?}"),
            (Status::Note, true) => {}
            _ => assert_eq!(check.fix, None, "{check:?}"),
        }
        assert!(!check.found.is_empty() && !check.why.is_empty());
        assert!(!check.found.contains(char::is_control));
        // What becomes root or changes a limit says so.
        let alters =
            check.fix.as_ref().and_then(|fix| fix.split("    #").next()).is_some_and(|fix| {
                (fix.contains("sudo ") && !fix.contains("sudo dmesg")) || fix.starts_with("ulimit ")
            });
        assert_eq!(check.changes.is_some(), check.fix.is_some(), "{check:?}");
        assert_eq!(check.changes.is_some_and(|changes| changes != "nothing"), alters, "{check:?}");
        // One command, which changes what it says and nothing else.
        let command = check.fix.iter().flat_map(|fix| fix.split("    #").next());
        for never in ["&&", ";", "reboot", "shutdown", "sed -i"] {
            assert!(command.clone().all(|command| !command.contains(never)), "{check:?}");
        }
    }
    let json = serde_json::to_value(report).unwrap();
    assert_eq!((&json["schema"], &json["command"]), (&3.into(), &"doctor".into()));
    // Its exit status is 0 then, whatever is missing.
    let lacks = report.can_load && report.checks.iter().any(|check| check.status == Status::Missing);
    assert_eq!(text(report).contains("The software card runs here without them"), lacks);
}

/// One check of a good machine on which these files are different.
fn with(changes: &[(&str, &[u8])], name: &str) -> (Status, String, String) {
    let mut files = good();
    files.extend(changes.iter().copied().map(|(p, c)| (p.to_owned().leak() as &str, c.to_owned().leak() as &[u8])));
    let (_root, probe) = machine(&files);
    let report = look(&probe);
    consistent(&report);
    let check = find(&report, name);
    (check.status, check.found.clone(), check.fix.clone().unwrap_or_default())
}

#[test]
fn a_good_machine_has_everything() {
    let (_root, probe) = machine(&good());
    let report = look(&probe);
    consistent(&report);
    assert!(report.can_load);
    // Direct I/O and the kernel's page size are this machine's own.
    let missing = report.checks.iter().filter(|c| c.status == Status::Missing && c.name != "direct_io");
    assert_eq!(missing.map(|c| c.name).collect::<Vec<_>>(), [""; 0]);
    for (name, found) in [
        ("memory", "3 GiB available (the memory cgroup /user)"),
        ("hugepages_2m", "60 free of 64 (116 MiB usable)"),
        ("thp", "madvise"),
        ("shmem_thp", "advise"),
        ("memlock", "soft unlimited, hard unlimited"),
        ("dma_heap", "system"),
        ("iommu_groups", "2 groups"),
        ("vfio", "/dev/vfio/vfio and iommufd; no device is bound to vfio-pci"),
    ] {
        assert_eq!(find(&report, name).found, found, "{name}");
    }
}

#[test]
fn devices_that_are_bound_to_vfio_are_named() {
    let (root, probe) = machine(&good());
    let device = root.path().join("sys/bus/pci/devices/0000:01:00.0");
    symlink("../../drivers/vfio-pci", device.join("driver")).unwrap();
    symlink("../../../kernel/iommu_groups/15", device.join("iommu_group")).unwrap();
    let driver = root.path().join("sys/bus/pci/drivers/vfio-pci");
    std::fs::create_dir_all(driver.join("0000:01:00.0")).unwrap();
    let vfio = |probe: &Probe, name: &str| {
        let report = look(probe);
        let check = find(&report, name);
        (check.status, check.found.clone(), check.fix.clone())
    };
    let (status, found, fix) = vfio(&probe, "vfio");
    assert!(
        status == Status::Note && found.starts_with("bound to vfio-pci: 0000:01:00.0 by no backend, not by iommufd: "),
        "{found}"
    );
    assert!(
        found.contains("no file below /dev/vfio/devices") && found.contains("not by type1: /dev/vfio/15 is missing")
    );
    assert_eq!(fix.unwrap(), "sudo modprobe vfio-pci");

    let group = root.path().join("dev/vfio/15");
    std::fs::write(&group, "").unwrap();
    let (status, found, _) = vfio(&probe, "vfio");
    assert_eq!(status, Status::Ok);
    assert!(found.starts_with("bound to vfio-pci: 0000:01:00.0 by type1 (/dev/vfio/15), not by iommufd: "), "{found}");
    // Root may open anything.
    if !rustix::process::geteuid().is_root() {
        let closed = std::os::unix::fs::PermissionsExt::from_mode(0o000);
        std::fs::set_permissions(&group, closed).unwrap();
        let (status, found, fix) = vfio(&probe, "vfio");
        assert!(status == Status::Note && found.contains("no permission to open /dev/vfio/15"), "{found}");
        assert!(fix.unwrap().ends_with("/dev/vfio/15"));
    }

    std::fs::create_dir_all(device.join("vfio-dev/vfio0")).unwrap();
    std::fs::create_dir_all(root.path().join("dev/vfio/devices")).unwrap();
    std::fs::write(root.path().join("dev/vfio/devices/vfio0"), "").unwrap();
    let found = "bound to vfio-pci: 0000:01:00.0 by iommufd (/dev/vfio/devices/vfio0)".to_owned();
    assert_eq!(vfio(&probe, "vfio"), (Status::Ok, found, None));

    std::fs::remove_file(device.join("iommu_group")).unwrap();
    let (status, found, fix) = vfio(&probe, "vfio");
    assert!(status == Status::Note && found.matches("is in no IOMMU group").count() == 1, "{found}");
    assert!(fix.unwrap().contains("iommu"));
}

#[test]
fn an_empty_machine_still_gets_a_report() {
    let (_root, probe) = machine(&[]);
    let report = look(&probe);
    consistent(&report);
    assert!(report.can_load, "what is not known is not held against it");
    for name in ["dma_heap", "udmabuf", "vfio", "iommu_groups"] {
        let check = find(&report, name);
        assert!(check.status == Status::Note && check.fix.is_some(), "{check:?}");
    }
    let text = text(&report);
    let (ours, real) = text.split_once("\nfor hardware (not needed by the software card):\n").unwrap();
    assert!(
        ours.contains("memlock")
            && real.contains("note     udmabuf")
            && real.contains("         fix: zgrep CONFIG_UDMABUF /proc/config.gz /boot/config-$(uname -r)\n")
    );
}

#[test]
fn garbage_is_no_panic() {
    let huge = "9".repeat(5000);
    let contents: [&[u8]; 9] = [
        b"",
        b"\xff\xfe\x00\x80",
        b"-1",
        huge.as_bytes(),
        b"18446744073709551615",
        b"[[[]]]",
        b"::::::\n:::\n0::/../../../etc\n1:memory:/\xff\n",
        b"MemTotal: 18446744073709551615 kB\nMemAvailable: -5 kB\nCapEff: zz\nMax locked memory x \
          y\nCpus_allowed_list: 0-18446744073709551615",
        b"MemTotal: 18446744073709551 kB\nMemAvailable: 18446744073709551 kB\nMax locked memory 18446744073709551615 \
          18446744073709551615\n\x1b[2J",
    ];
    for content in contents {
        let files: Vec<_> = good().into_iter().map(|(path, _)| (path, content)).collect();
        consistent(&look(&machine(&files).1));
    }
    // Directories where files should be, and names that no kernel gives.
    let (root, probe) = machine(&[]);
    for (path, _) in good() {
        fs::create_dir_all(root.path().join(path)).unwrap();
    }
    let name: &std::ffi::OsStr = std::os::unix::ffi::OsStrExt::from_bytes(b"bad\xff\x1b[31m\nname");
    fs::write(root.path().join("dev/dma_heap").join(name), "").unwrap();
    consistent(&look(&probe));
}

#[test]
fn each_missing_item_comes_with_a_fix() {
    let (status, found, fix) =
        with(&[(&format!("{POOL}/nr_hugepages"), b"10"), (&format!("{POOL}/free_hugepages"), b"5")], "hugepages_2m");
    assert_eq!((status, found.as_str()), (Status::Missing, "5 free of 10; a load with the default --chunk takes 32"));
    // 5 free of which 2 are promised: 29 more are wanted.
    assert_eq!(fix, format!("echo 39 | sudo tee /{POOL}/nr_hugepages"));
    let on_demand = with(
        &[(&format!("{POOL}/free_hugepages"), b"0"), (&format!("{POOL}/nr_overcommit_hugepages"), b"512")],
        "hugepages_2m",
    );
    assert_eq!(on_demand.0, Status::Ok);

    let never = with(&[("sys/kernel/mm/transparent_hugepage/enabled", b"always madvise [never]")], "thp");
    assert_eq!(never.2, "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled");

    let limits = |line: &str| with(&[("proc/self/limits", line.as_bytes())], "memlock");
    assert_eq!(limits("Max locked memory  65536  unlimited  bytes").2, "ulimit -l unlimited");
    assert_eq!(limits("Max locked memory  65536  134217728  bytes").2, "ulimit -l 131072");
    assert_eq!(limits("Max locked memory  65536  65536  bytes").2, "sudo prlimit --pid $$ --memlock=unlimited");
    let root: (&str, &[u8]) = ("proc/self/status", b"CapEff:\t000001ffffffffff\nSeccomp:\t0");
    assert_eq!(with(&[("proc/self/limits", b"Max locked memory  1  1  bytes"), root], "memlock").0, Status::Ok);

    let (groups, intel) = ("sys/kernel/iommu_groups", b"vendor_id\t: GenuineIntel\n");
    let mut files: Vec<(&str, &[u8])> = good().into_iter().filter(|(path, _)| !path.starts_with(groups)).collect();
    files.retain(|(path, _)| *path != "proc/cpuinfo");
    files.push(("proc/cpuinfo", intel));
    let switch_on = |files: &[(&str, &[u8])]| find(&look(&machine(files).1), "iommu_groups").fix.clone().unwrap();
    assert!(switch_on(&files).contains("sudo tee /etc/default/grub.d/iommu.cfg"), "{}", switch_on(&files));
    files.push(("usr/sbin/grubby", b""));
    assert!(switch_on(&files).starts_with("sudo grubby --update-kernel=ALL"), "{}", switch_on(&files));
}

const NO_MODULE: &str = "    # not there for this kernel: boot one that has it, or install the driver";

#[test]
fn fixes_are_those_of_the_machine() {
    let fix = |without: &[&str], more: &[(&'static str, &'static [u8])], name: &str| {
        let is_left = |(path, _): &(&str, &[u8])| !without.iter().any(|begin| path.starts_with(begin));
        let mut files: Vec<_> = good().into_iter().filter(is_left).collect();
        files.retain(|(path, _)| !more.iter().any(|(other, _)| path == other));
        files.extend(more);
        let (_root, probe) = machine(&files);
        let report = look(&probe);
        consistent(&report);
        find(&report, name).fix.clone().unwrap()
    };
    let nodes = &["dev/"][..];
    assert_eq!(fix(nodes, &[], "vfio"), "sudo modprobe vfio-pci");
    let none: [(&str, &[u8]); 1] = [("lib/modules/6.12.3-amd64/modules.dep", b"")];
    assert_eq!(fix(nodes, &none, "vfio"), format!("modinfo vfio-pci{NO_MODULE}"));
    // Where it can be read, it is one of these.
    let option = "zgrep CONFIG_TRANSPARENT_HUGEPAGE /proc/config.gz /boot/config-$(uname -r)    # boot a kernel that";
    assert!(fix(&["sys/kernel/mm/transparent"], &none, "thp").starts_with(option));
    // A virtual machine cannot switch on what it was not given.
    let guest: [(&str, &[u8]); 1] =
        [("proc/cpuinfo", b"vendor_id\t: GenuineIntel\nflags\t\t: fpu hypervisor lahf_lm\n")];
    assert!(fix(&["sys/kernel/iommu_groups"], &guest, "iommu_groups").contains("QEMU by -device intel-iommu"));
    let given: [(&str, &[u8]); 2] = [guest[0], ("sys/firmware/acpi/tables/DMAR", b"")];
    assert!(fix(&["sys/kernel/iommu_groups"], &given, "iommu_groups").contains("intel_iommu=on"));
    // A container has its kernel from its host, and may lack its modules.
    for file in CONTAINER {
        let file: [(&str, &[u8]); 1] = [(file.trim_start_matches('/'), b"")];
        let modprobe = "sudo modprobe vfio-pci    # on the host of this container";
        assert_eq!([fix(nodes, &file, "vfio"), fix(&["dev/", "lib/"], &file, "vfio")], [modprobe; 2]);
        let groups = fix(&["sys/kernel/iommu_groups"], &file, "iommu_groups");
        assert!(groups.ends_with("with VT-d on in the firmware; on the host of this container"), "{groups}");
    }
}

#[test]
fn too_little_memory_is_a_failure() {
    for changes in [
        [("proc/meminfo", b"MemTotal: 100000 kB\nMemAvailable: 50000 kB".as_slice())],
        [("sys/fs/cgroup/user/memory.max", b"67108864")],
        [("proc/self/cgroup", b"4:memory:/a/b")],
    ] {
        let mut files = good();
        files.push(("sys/fs/cgroup/memory/a/memory.limit_in_bytes", b"67108864"));
        files.push(("sys/fs/cgroup/memory/a/memory.usage_in_bytes", b"4096"));
        files.push(("sys/fs/cgroup/memory/memory.limit_in_bytes", b"9223372036854771712"));
        files.extend(changes);
        let report = look(&machine(&files).1);
        consistent(&report);
        assert!(!report.can_load);
        assert!(text(&report).contains("cannot run here"));
    }
}

#[test]
fn direct_io_is_tried_on_directories_and_files_and_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().join("empty");
    fs::write(&empty, "").unwrap();
    for path in [dir.path(), &empty] {
        let check = super::io::direct(path).unwrap_or_else(|_| panic!("{} is there", path.display()));
        assert!(check.found.starts_with(&path.display().to_string()), "{}", check.found);
    }
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    assert!(super::io::direct(&dir.path().join("missing")).is_err());
    assert!(super::io::direct(Path::new("/dev/null")).is_err(), "reading a character device may wait for ever");
}

#[test]
fn how_long_a_file_may_be_read_is_said() {
    let fix = |node| {
        let fix = super::io::permit(node, Path::new("/dev/a disk"));
        let changes = changes(&fix);
        (fix, changes)
    };
    assert_eq!(fix(false), ("sudo chmod a+r '/dev/a disk'".to_owned(), "lets everybody read it, for good"));
    let (command, changes) = fix(true);
    assert_eq!(command, "sudo setfacl -m u:$USER:r '/dev/a disk'");
    assert_eq!(changes, "lets this user open it, until the machine restarts or the device is replugged");
}

#[test]
fn a_file_system_in_memory_is_a_note() {
    let shm = Path::new("/dev/shm");
    if rustix::fs::statfs(shm).is_ok_and(|s| s.f_type as u32 == 0x0102_1994) {
        let check = super::io::direct(shm).unwrap_or_else(|_| panic!("it is there"));
        assert_eq!(check.status, Status::Note);
        assert_eq!(check.found, "/dev/shm: tmpfs keeps its files in memory: there is no disk to read directly");
    }
}

#[test]
fn words_survive_the_shell() {
    for word in ["/a/b-c.d_e", "", "it's", "a b", "$HOME;`x`", "-n\u{e9}"] {
        let echoed = std::process::Command::new("sh")
            .arg("-c")
            .arg(format!("printf %s {}", crate::layout::shell_words(&[word])))
            .output()
            .unwrap();
        assert_eq!(String::from_utf8(echoed.stdout).unwrap(), word);
    }
}

/// A machine with a V80 under SLASH.
fn v80() -> Vec<(&'static str, &'static [u8])> {
    let mut files = good();
    files.extend([
        ("dev/slash_ctl0", b"".as_slice()),
        ("dev/slash_qdma_ctl0", b""),
        ("dev/slash_hotplug", b""),
        ("run/vrtd.sock", b""),
        ("lib/modules/6.12.3-amd64/modules.dep", b"updates/dkms/slash.ko:\n"),
        ("sys/module/slash/version", b"1.2.0\n"),
        ("sys/module/slash/parameters/qdma_num_threads", b"8\n"),
        ("sys/bus/pci/devices/0000:61:00.1/class", b"0x120000\n"),
        ("sys/bus/pci/devices/0000:61:00.1/vendor", b"0x10ee\n"),
        ("sys/bus/pci/devices/0000:61:00.1/device", b"0x50c1\n"),
        ("sys/bus/pci/devices/0000:61:00.1/current_link_speed", b"32.0 GT/s PCIe\n"),
        ("sys/bus/pci/devices/0000:61:00.1/resource", b"0x0000020000000000 0x0000020003ffffff 0x000000000014220c\n"),
    ]);
    files
}

#[test]
fn what_slash_lacks_comes_with_a_command() {
    let check = |without: &[&str], name: &str| {
        let is_left = |(path, text): &(&str, &[u8])| {
            !without.iter().any(|begin| path.starts_with(begin) || text.starts_with(begin.as_bytes()))
        };
        let files: Vec<_> = v80().into_iter().filter(is_left).collect();
        let (_root, probe) = machine(&files);
        let report = look(&probe);
        consistent(&report);
        let check = find(&report, name);
        (check.status, check.found.clone(), check.fix.clone())
    };
    let nodes = ["dev/slash_ctl0", "dev/slash_qdma_ctl0"];
    let (status, found, _) = check(&[], "slash");
    let ok = "/dev/slash_ctl0, /dev/slash_qdma_ctl0; module slash 1.2.0";
    assert_eq!((status, found.as_str()), (Status::Ok, ok));
    assert_eq!(check(&[], "vrtd").0, Status::Ok);
    let fix = |without: &[&str], name| check(without, name).2.unwrap();
    assert_eq!(fix(&[&nodes[..], &["sys/module/slash"]].concat(), "slash"), "sudo modprobe slash");
    let no_driver = [&nodes[..], &["sys/module/slash", "updates/dkms/slash"]].concat();
    assert_eq!(fix(&no_driver, "slash"), format!("modinfo slash{NO_MODULE}"));
    assert!(fix(&nodes, "slash").starts_with("sudo dmesg | grep slash "));
    assert!(fix(&nodes[1..], "slash").starts_with("sudo dmesg | grep slash_qdma"));
    let no_card = [&nodes[..], &["sys/bus/pci/devices/0000:61"]].concat();
    assert_eq!(fix(&no_card, "slash"), "echo 1 | sudo tee /sys/bus/pci/rescan");
    assert_eq!(fix(&["run/"], "vrtd"), "sudo systemctl enable --now vrtd.socket");
    let nothing = [&no_card[..], &["sys/module/slash", "run/"]].concat();
    for name in ["slash", "vrtd"] {
        let (status, found, fix) = check(&nothing, name);
        assert!(status == Status::Note && fix.is_none() && found.contains("no V80"), "{found}");
    }
    // Root may open anything.
    if rustix::process::geteuid().is_root() {
        return println!("SKIPPED: root may open nodes that are closed");
    }
    let (root, probe) = machine(&v80());
    for path in ["dev/slash_qdma_ctl0", "run/vrtd.sock"] {
        let closed = std::os::unix::fs::PermissionsExt::from_mode(0o000);
        fs::set_permissions(root.path().join(path), closed).unwrap();
    }
    let report = look(&probe);
    assert_eq!(find(&report, "slash").fix.as_deref(), Some("sudo setfacl -m u:$USER:rw /dev/slash_qdma_ctl0"));
    assert!(find(&report, "vrtd").fix.as_deref().unwrap().starts_with("sudo usermod -aG vrt $USER"));
}
