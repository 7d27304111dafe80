//! Names of backups of device memory in files: who writes a backup makes its name here, and who must not lose one knows
//! it by its name.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

const END: &[u8] = b".dmalane-backup";
const REPLACED: &[u8] = b"-replaced-";
const DEVICE: &str = "backup-of-device-";
const DISK: &str = "backup-of-disk-";
/// The longest name of a file that a backup's name holds whole: a name has at most 255 bytes.
const MOST: usize = 200;
/// Bytes of a longer one that it holds, before a hash of all.
const BEGIN: usize = 180;

/// The name of the backup of a regular file, which lies beside it; `hash` is the hash of the file's name.
pub fn of_file(name: &OsStr, hash: impl FnOnce(&[u8]) -> u64) -> OsString {
    let name = name.as_bytes();
    let of = match name.len() > MOST {
        true => [&name[..BEGIN], format!("-{:016x}", hash(name)).as_bytes()].concat(),
        false => name.to_vec(),
    };
    OsString::from_vec([b".", &*of, END].concat())
}

/// The name of the backup of a block device without a name that lasts.
pub fn of_device(rdev: u64) -> OsString {
    format!("{DEVICE}{rdev:x}").into()
}

/// The name of the backup of a disk; `hash` is the hash of what it is known by.
pub fn of_disk(hash: u64) -> OsString {
    format!("{DISK}{hash:016x}").into()
}

/// The name of the n-th backup of the data that restoring a backup has replaced.
pub fn of_replaced(backup: &OsStr, n: u32) -> OsString {
    OsString::from_vec([backup.as_bytes(), REPLACED, n.to_string().as_bytes()].concat())
}

/// Whether it is one of these names.
pub fn is_backup_name(name: &OsStr) -> bool {
    let name = name.as_bytes();
    let digits = name.iter().rev().take_while(|byte| byte.is_ascii_digit()).count();
    let (before, number) = name.split_at(name.len() - digits);
    let name = match before.strip_suffix(REPLACED) {
        Some(before) if !number.is_empty() => before,
        _ => name,
    };
    let is_hex = |text: &[u8]| text.iter().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
    if let Some(rdev) = name.strip_prefix(DEVICE.as_bytes()) {
        return (1..=16).contains(&rdev.len()) && is_hex(rdev);
    }
    if let Some(hash) = name.strip_prefix(DISK.as_bytes()) {
        return hash.len() == 16 && is_hex(hash);
    }
    let of = name.strip_prefix(b".").and_then(|name| name.strip_suffix(END));
    of.is_some_and(|of| (1..=MOST).contains(&of.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_backups_are_known_and_no_others() {
        let made = [
            of_file("card".as_ref(), |_| 0),
            of_file("a.dmalane-backup".as_ref(), |_| 0),
            of_file(OsStr::from_bytes(b"card\xff"), |_| 0),
            of_file("n".repeat(200).as_ref(), |_| 0),
            of_file("n".repeat(255).as_ref(), |name| name.len() as u64),
            of_device(0x700),
            of_disk(7),
        ];
        for name in &made {
            assert!(name.len() < 256 - "-replaced-4294967295".len(), "{}", name.display());
            for name in [name.clone(), of_replaced(name, 1), of_replaced(name, u32::MAX)] {
                assert!(is_backup_name(&name), "{}", name.display());
            }
        }
        assert_eq!(made[0], ".card.dmalane-backup");
        assert_eq!(
            (made[5].as_os_str(), &*made[6]),
            ("backup-of-device-700".as_ref(), "backup-of-disk-0000000000000007".as_ref())
        );
        for other in [
            "",
            ".",
            "card.dmalane-backup",
            ".dmalane-backup",
            ".card.dmalane-backup.txt",
            ".card.dmalane-backup-notes",
            ".card.dmalane-backup-replaced-",
            ".card.dmalane-backup-replaced-x",
            "-replaced-1",
            "my-backup-of-device-700",
            "backup-of-device-",
            "backup-of-device-xyz",
            "backup-of-device-700.safetensors",
            "backup-of-disk-7",
        ] {
            assert!(!is_backup_name(other.as_ref()), "{other}");
        }
        assert!(!is_backup_name(format!(".{}.dmalane-backup", "n".repeat(201)).as_ref()));
    }
}
