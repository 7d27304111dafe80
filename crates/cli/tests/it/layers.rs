//! Programs that use a GPU, under the Vulkan validation layers: their messages are on stderr, and fail a test.

use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

/// Where Debian installs the layers.
const INSTALLED: &str = "/usr/share/vulkan/explicit_layer.d/VkLayer_khronos_validation.json";

const SETTINGS: &str = "\
khronos_validation.debug_action = VK_DBG_LAYER_ACTION_LOG_MSG
khronos_validation.report_flags = error,warn,perf
khronos_validation.log_filename = /dev/stderr
khronos_validation.enables = VK_VALIDATION_FEATURE_ENABLE_SYNCHRONIZATION_VALIDATION_EXT
";

/// True, and said on stdout, when a program found no Vulkan; other failures to open a GPU are failures of a test. So is
/// this one where `DMALANE_NEED_GPU` is set, as `scripts/check` does on machines with a driver.
pub fn is_skip(errors: &str) -> bool {
    let skip = ["cannot load libvulkan", "Vulkan found no driver"].iter().any(|why| errors.contains(why));
    if skip {
        assert!(std::env::var_os("DMALANE_NEED_GPU").is_none(), "DMALANE_NEED_GPU is set: {errors}");
        println!("SKIPPED: {errors}");
    }
    skip
}

/// The settings of the layers.
pub struct Layers(TempDir);

impl Layers {
    pub fn new() -> Self {
        let needed = std::env::var_os("DMALANE_NEED_GPU").is_some();
        assert!(Self::are_there() || !needed, "DMALANE_NEED_GPU is set, and the validation layers are not installed");
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("vk_layer_settings.txt"), SETTINGS).unwrap();
        Self(folder)
    }

    /// True where the layers can be had.
    fn are_there() -> bool {
        std::env::var_os("VK_LAYER_PATH").is_some() || Path::new(INSTALLED).exists()
    }

    /// A program under the layers. `DMALANE_RUNNER` has words that start it, a line each: `scripts/mesa` starts
    /// programs with the libraries of a newer Mesa.
    pub fn command(&self, program: &Path) -> Command {
        let runner = std::env::var("DMALANE_RUNNER").unwrap_or_default();
        let mut words = runner.lines();
        let mut command = match words.next() {
            Some(first) => {
                let mut command = Command::new(first);
                command.args(words).arg(program);
                command
            }
            None => Command::new(program),
        };
        if Self::are_there() {
            command.env("VK_INSTANCE_LAYERS", "VK_LAYER_KHRONOS_validation");
            // Says which layers are used.
            command.env("VK_LAYER_SETTINGS_PATH", self.0.path()).env("VK_LOADER_DEBUG", "layer");
        }
        command
    }

    /// The printed text. Fails where the layers had something to say, or did not run although they are there.
    pub fn check(&self, output: &Output) -> String {
        let said = String::from_utf8_lossy(&output.stderr);
        let bad = ["VUID", "SYNC-HAZARD", "Validation Error", "Validation Performance"];
        let messages = said.lines().filter(|line| bad.iter().any(|bad| line.contains(bad))).count();
        assert_eq!(messages, 0, "messages of the layers: {said}");
        assert!(said.contains("VK_LAYER_KHRONOS_validation") || !Self::are_there(), "no layers: {said}");
        let text = String::from_utf8_lossy(&output.stdout);
        // They say there where they write.
        text.lines().filter(|line| !line.starts_with("Validation Layer Info")).collect::<Vec<_>>().join("\n")
    }
}
