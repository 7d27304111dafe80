//! A program in C against the header and both libraries.

// A V80 for a program that knows nothing of it; that module has the reasons for its unsafe code.
#[path = "../../cli/tests/it/layers.rs"]
mod layers;
#[path = "../../cli/tests/it/supervisor.rs"]
mod supervisor;

use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use dmalane::daemon::{ClientOptions, Config, Listener, Server, status};
use dmalane::keep::{Keeper, KeeperConfig};
use dmalane::load::kept::{self, KeepOptions};
use dmalane::queue::{DeviceAddr, OpError, Operation, Queue, Registered, RunError, StopReason, run};
use dmalane::sim::{CardConfig, Workers};
use dmalane::{CardServer, Placement};
use dmalane_addr::Access;
use dmalane_fake_cuda::Fake;
use dmalane_slash::model::{DriverModel, Version, Vrtd};
use layers::{Layers, is_skip};

/// Where cargo has put the libraries: beside this test.
fn libraries() -> PathBuf {
    // By the name that it was started with: `scripts/mesa` starts it through another loader of libraries.
    let test = std::path::absolute(std::env::args_os().next().unwrap()).unwrap();
    test.parent().unwrap().to_owned()
}

/// The newest file whose name begins and ends so.
fn newest(folder: &Path, begins: &str, ends: &str) -> Option<PathBuf> {
    let files = std::fs::read_dir(folder).unwrap().filter_map(Result::ok);
    let fits = files.filter(|f| {
        let name = f.file_name();
        let name = name.to_string_lossy();
        name.starts_with(begins) && name.ends_with(ends)
    });
    fits.max_by_key(|f| f.metadata().and_then(|m| m.modified()).unwrap()).map(|f| f.path())
}

/// The words of a variable of the environment.
fn words(variable: &str) -> Vec<String> {
    std::env::var(variable).unwrap_or_default().split_whitespace().map(str::to_owned).collect()
}

/// Compiles a program with `CFLAGS` and links it with `LDFLAGS`: a sanitizer that the libraries have is one that it
/// needs, and its runtime is that of one compiler, of this or of the libraries.
fn compile(compiler: &str, source: &str, name: &str, arguments: &[&str], library: &Path) -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let object = program.with_extension("o");
    let run = |command: &mut Command| {
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    };
    let mut compiled = Command::new(compiler);
    compiled.args(arguments).args(words("CFLAGS")).args(["-Wall", "-Wextra", "-Werror", "-g", "-c", "-I"]);
    run(compiled.arg(here.join("include")).arg(here.join(source)).arg("-o").arg(&object));
    let mut linked = Command::new(compiler);
    linked.arg(&object).arg("-o").arg(&program).arg(library).args(words("LDFLAGS")).args(["-lpthread", "-ldl", "-lm"]);
    run(linked.arg(format!("-Wl,-rpath,{}", library.parent().unwrap().display())));
    program
}

#[test]
fn a_program_in_c() {
    if Command::new("cc").arg("--version").output().is_err() {
        println!("SKIPPED: there is no C compiler cc");
        return;
    }
    let folder = libraries();
    for (kind, ends) in [("shared", ".so"), ("static", ".a")] {
        let Some(library) = newest(&folder, "libdmalane_capi", ends) else {
            panic!("no {kind} library in {}", folder.display())
        };
        let program = compile("cc", "tests/capi.c", &format!("capi-{kind}"), &["-std=c11"], &library);
        let ran = Command::new(&program).output().unwrap();
        let (said, status) = (String::from_utf8_lossy(&ran.stdout), ran.status);
        print!("{}", String::from_utf8_lossy(&ran.stderr)); // what was skipped
        assert!(
            status.success() && said.is_empty(),
            "{kind}: {status}\n{said}{}",
            String::from_utf8_lossy(&ran.stderr)
        );
    }
}

#[test]
fn a_program_in_c_attaches_to_what_is_kept() {
    if Command::new("cc").arg("--version").output().is_err() {
        println!("SKIPPED: there is no C compiler cc");
        return;
    }
    let library = newest(&libraries(), "libdmalane_capi", ".so").expect("a shared library");
    let program = compile("cc", "tests/kept.c", "kept", &["-std=c11"], &library);
    let (fake, folder) = (Fake::turn(), tempfile::tempdir().unwrap());
    let (path, socket) = (folder.path().join("m.safetensors"), folder.path().join("socket"));
    dmalane::load::write_sample(&mut std::fs::File::create(&path).unwrap(), 1 << 20, 1).unwrap();
    let listener = Listener::bind(&socket, 0o600, true).unwrap();
    let (stop, stopped) = UnixStream::pair().unwrap();
    let keeper = Keeper::new(KeeperConfig { memory: 8 << 20, ..KeeperConfig::default() }, |_| {});
    let keeper = std::thread::spawn(move || keeper.run(listener, stopped.as_fd()));
    let options = KeepOptions { socket: Some(socket.clone()), ..KeepOptions::default() };
    let watch = |_| ControlFlow::Continue(());
    let mut device = dmalane::open(&format!("cuda:0,lib={}", fake.path())).unwrap();
    kept::keep(Some(&mut device), [&path], &options, watch).unwrap();
    drop(device);
    kept::keep(None, [&path], &options, watch).unwrap();
    let ran = Command::new(&program).env("DMALANE_KEEP", socket).env("DMALANE_CUDA_LIB", fake.path()).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    drop(stop);
    keeper.join().unwrap().unwrap();
    fake.assert_clean("attached to in C");
}

/// The example, on a device.
fn example(device: &str) {
    if Command::new("cc").arg("--version").output().is_err() {
        println!("SKIPPED: there is no C compiler cc");
        return;
    }
    let library = newest(&libraries(), "libdmalane_capi", ".so").expect("a shared library");
    let name = format!("device-{}", device.replace(':', "-"));
    let program = compile("cc", "examples/device.c", &name, &["-std=c11"], &library);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, vec![7; 1_000_000]).unwrap();
    let layers = Layers::new();
    let ran = layers.command(&program).arg(device).arg(&file).output().unwrap();
    let (said, errors) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    if ran.status.code() == Some(2) && is_skip(&errors) {
        return;
    }
    assert!(ran.status.success() && said.contains("went there and back"), "{}: {said}{errors}", ran.status);
    assert!(said.contains("1000000 bytes at "), "{said}");
    if device != "soft" {
        layers.check(&ran);
    }
}

/// Valgrind finds nothing wrong, whatever the library was compiled with.
#[test]
fn the_example_runs_under_valgrind() {
    if Command::new("valgrind").arg("--version").output().is_err() || !words("CFLAGS").is_empty() {
        println!("SKIPPED: there is no Valgrind, or it is a build for a sanitizer");
        return;
    }
    let library = newest(&libraries(), "libdmalane_capi", ".so").expect("a shared library");
    let program = compile("cc", "examples/device.c", "device-valgrind", &["-std=c11"], &library);
    let mut valgrind = Command::new("valgrind");
    valgrind.args(["-q", "--error-exitcode=9"]).arg(&program).arg("soft,ddr=64MiB,hbm=4MiB");
    let ran = valgrind.output().unwrap();
    let (said, errors) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success() && said.contains("went there and back"), "{}: {said}{errors}", ran.status);
}

#[test]
fn the_example_runs_on_the_software_card() {
    example("soft");
}

#[test]
fn the_example_runs_on_a_gpu() {
    example("vulkan:0");
}

#[test]
fn a_program_in_c_on_gpus() {
    if Command::new("cc").arg("--version").output().is_err() {
        println!("SKIPPED: there is no C compiler cc");
        return;
    }
    let library = newest(&libraries(), "libdmalane_capi", ".so").expect("a shared library");
    let program = compile("cc", "tests/capi.c", "capi-gpus", &["-std=c11"], &library);
    let fake = Fake::turn();
    let cuda = format!("cuda:0,lib={}", fake.path());
    for device in ["vulkan:0", &cuda] {
        if let Err(e) = dmalane::open(device) {
            println!("SKIPPED: {device}: {e}");
            continue;
        }
        let ran = Command::new(&program).arg(device).output().unwrap();
        let (said, errors) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
        assert!(ran.status.success() && said.is_empty(), "{device}: {}\n{said}{errors}", ran.status);
    }
}

#[test]
fn a_program_in_c_on_a_v80() {
    if Command::new("cc").arg("--version").output().is_err() {
        println!("SKIPPED: there is no C compiler cc");
        return;
    }
    let library = newest(&libraries(), "libdmalane_capi", ".so").expect("a shared library");
    let program = compile("cc", "tests/capi.c", "capi-v80", &["-std=c11"], &library);
    let model = DriverModel::new(Version::KNOWN).unwrap();
    let vrtd = Vrtd::new(&model).unwrap();
    let socket = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("vrtd-{}.sock", std::process::id()));
    vrtd.listen(&socket).unwrap();
    for device in ["slash:0", &format!("vrtd:{}#0", socket.display())] {
        let before = model.counts().channels;
        let Some(ran) = supervisor::run(&model, Command::new(&program).arg(device), None) else { return };
        let (said, errors) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
        assert!(ran.status.success() && said.is_empty(), "{device}: {}\n{said}{errors}", ran.status);
        let moved = model.counts().channels;
        assert!(moved.iter().all(|(channel, bytes)| before.get(channel) < Some(bytes)), "{device}: {moved:?}");
        assert_eq!((model.violations(), model.pairs(), vrtd.lent()), (Vec::new(), 0, Vec::new()), "{device}");
    }
    std::fs::remove_file(socket).unwrap();
}

/// Marks the process that serves the device of a test, by its socket; and what it serves.
const SOCKET: &str = "DMALANE_TEST_SOCKET";
const KIND: &str = "DMALANE_TEST_KIND";

/// A process that serves a device, which can be stopped and killed.
struct Served(Child);

impl Served {
    /// Starts the same test again, which then runs [`Served::serve`], and waits until it listens.
    fn start(test: &str, kind: &str, socket: &Path) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", test, "--nocapture", "--test-threads=1"]).env(SOCKET, socket).env(KIND, kind);
        // A group of its own: its processes are stopped together.
        let child = command.stdout(Stdio::null()).process_group(0).spawn().unwrap();
        let served = Self(child);
        let listens = || match kind {
            "daemon" => status(&ClientOptions::new(socket)).is_ok(),
            _ => UnixStream::connect(socket).is_ok(),
        };
        let start = Instant::now();
        while !listens() {
            assert!(start.elapsed() < Duration::from_secs(60), "nothing listens");
            std::thread::sleep(Duration::from_millis(5));
        }
        served
    }

    /// In the process that [`Served::start`] has started, serves until it is killed. False in any other.
    fn serve() -> bool {
        let (Some(socket), Some(kind)) = (std::env::var_os(SOCKET), std::env::var_os(KIND)) else { return false };
        if kind == "daemon" {
            let listener = Listener::bind(Path::new(&socket), 0o600, false).unwrap();
            let server = Server::new(Config::default(), |_| {}).unwrap();
            let (_stop, stopped) = UnixStream::pair().unwrap();
            server.run(listener, stopped.as_fd()).unwrap();
            return true;
        }
        let config = CardConfig { ddr: 16 << 20, hbm: 16 << 20, channels: 2, workers: Workers::PerChannel };
        let server = CardServer::bind(Path::new(&socket), config).unwrap();
        loop {
            let _ended = server.accept().unwrap().serve().unwrap();
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The operations of a device whose process is lost end with ENODEV, and all objects can be destroyed: in C and in
/// Rust, idle and with operations in flight, killed and stopped.
#[test]
fn a_device_without_its_process_is_lost() {
    const TEST: &str = "a_device_without_its_process_is_lost";
    if Served::serve() {
        return;
    }
    if Command::new("cc").arg("--version").output().is_err() {
        println!("SKIPPED: there is no C compiler cc");
        return;
    }
    let library = newest(&libraries(), "libdmalane_capi", ".so").expect("a shared library");
    let program = compile("cc", "tests/lost.c", "capi-lost", &["-std=c11"], &library);
    let folder = tempfile::tempdir().unwrap();
    let ways = [("vfio-user", ["idle", "flying", "stopped"]), ("daemon", ["idle", "flying", "unmapping"])];
    let in_c = |kind: &str, how: &str| {
        let socket = folder.path().join(format!("{kind}-{how}-c"));
        let served = Served::start(TEST, kind, &socket);
        let device = format!("{kind}:{}", socket.display());
        let ran = Command::new(&program).args([&device, &served.0.id().to_string(), how]).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && said.is_empty(), "{kind} {how}: {} {said}", ran.status);
    };
    let in_rust = |kind: &str, how: &str| {
        let socket = folder.path().join(format!("{kind}-{how}"));
        let served = Served::start(TEST, kind, &socket);
        let mut opened = dmalane::open(&format!("{kind}:{}", socket.display())).unwrap();
        let registrar = opened.registrar().clone();
        let buffer = registrar.heap(None).allocate(1 << 20).unwrap().share();
        let via = Registered::new(&*registrar, &buffer, Access::RW).unwrap();
        let table = opened.memory_mut().allocate(1 << 20, &Placement::Default).unwrap();
        let at = DeviceAddr::Card(table.segments().next().unwrap().addr);
        let operation = Operation::write((buffer.into_slice(), via), at);
        let queue = opened.queue_mut();
        let operation = run(queue, operation, Duration::from_secs(60)).unwrap();
        let stopped = !matches!(how, "idle" | "flying");
        let signal = if stopped { "-STOP" } else { "-KILL" };
        let sent = Command::new("kill").args([signal, "--", &format!("-{}", served.0.id())]).status().unwrap();
        assert!(sent.success());
        std::thread::sleep(Duration::from_millis(100)); // its threads go on for a moment
        let began = Instant::now();
        let RunError { operation, error } = run(queue, operation, Duration::from_secs(60)).unwrap_err();
        assert!(matches!(error, OpError::Stopped(StopReason::Lost(_))), "{kind} {how}: {error}");
        assert!(began.elapsed() < Duration::from_secs(if stopped { 25 } else { 10 }), "{kind} {how}");
        assert_eq!(operation.is_none(), stopped, "{kind} {how}: the memory is free again, or never used again");
        assert!(queue.in_flight() == usize::from(stopped) && !queue.restart(), "{kind} {how}");
    };
    // Those that are stopped wait for their time limits.
    std::thread::scope(|scope| {
        for (kind, ways) in ways {
            let (in_c, in_rust) = (&in_c, &in_rust);
            scope.spawn(move || ways.map(|how| in_c(kind, how)));
            scope.spawn(move || ways.map(|how| in_rust(kind, how)));
        }
    });
}

/// Whatever is asked of it first.
#[test]
fn a_daemon_that_was_killed_is_lost_to_every_call() {
    const TEST: &str = "a_daemon_that_was_killed_is_lost_to_every_call";
    if Served::serve() {
        return;
    }
    if Command::new("cc").arg("--version").output().is_err() {
        println!("SKIPPED: there is no C compiler cc");
        return;
    }
    let library = newest(&libraries(), "libdmalane_capi", ".so").expect("a shared library");
    let program = compile("cc", "tests/lost.c", "capi-lost-first", &["-std=c11"], &library);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("file");
    std::fs::write(&file, vec![7; 1 << 20]).unwrap();
    for how in ["bind", "memory", file.to_str().unwrap()] {
        let socket = folder.path().join("socket");
        let _ = std::fs::remove_file(&socket);
        let served = Served::start(TEST, "daemon", &socket);
        let device = format!("daemon:{}", socket.display());
        let ran = Command::new(&program).args([&device, &served.0.id().to_string(), how]).output().unwrap();
        let said = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && said.is_empty(), "{how}: {} {said}", ran.status);
    }
}

#[test]
fn a_daemon_that_hangs_holds_up_nobody_else() {
    if Served::serve() {
        return;
    }
    if Command::new("cc").arg("--version").output().is_err() {
        println!("SKIPPED: there is no C compiler cc");
        return;
    }
    let library = newest(&libraries(), "libdmalane_capi", ".so").expect("a shared library");
    let program = compile("cc", "tests/stopped.c", "capi-stopped", &["-std=c11"], &library);
    let folder = tempfile::tempdir().unwrap();
    let sockets = ["stopped", "works"].map(|name| folder.path().join(name));
    let daemons =
        sockets.each_ref().map(|socket| Served::start("a_daemon_that_hangs_holds_up_nobody_else", "daemon", socket));
    let stopped = daemons[0].0.id().to_string();
    let mut program = Command::new(&program);
    let program = program.arg(&sockets[0]).arg(stopped).arg(&sockets[1]);
    let mut ran = program.stdout(Stdio::piped()).spawn().unwrap();
    // A call that waits for the daemon that is stopped waits for ever.
    let start = Instant::now();
    let status = loop {
        match ran.try_wait().unwrap() {
            Some(status) => break status,
            None if start.elapsed() > Duration::from_secs(240) => {
                ran.kill().unwrap();
                panic!("a call on the daemon that works waits for the one that is stopped");
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    let said = std::io::read_to_string(ran.stdout.take().unwrap()).unwrap();
    assert!(status.success() && said.is_empty(), "{status}: {said}");
}

#[test]
fn the_header_is_right_for_cpp_too() {
    if Command::new("c++").arg("--version").output().is_err() {
        println!("SKIPPED: there is no C++ compiler c++");
        return;
    }
    let header = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/dmalane.h");
    let out = Command::new("c++")
        .args(["-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-x", "c++"])
        .arg(header)
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}
