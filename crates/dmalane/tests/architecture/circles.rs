//! Circles between the files of a crate: files that take names from each other, re-exports resolved.
//!
//! Text is enough: `use` declarations and paths are read from the tokens of a file and followed through the modules
//! to the file that defines the name. Tests do not count, and neither do methods, which no path names. A file that
//! only declares and re-exports is passed through.

use std::collections::{BTreeMap, BTreeSet};

use super::{CRATES, code_only, files, read, report, root};

/// The circles that may stay: a crate, its files, and why a reader would draw them as one thing.
const ALLOWED: &[(&str, &str, &str)] = &[
    (
        "cuda",
        "sys.rs sys/back_to_back.rs sys/borrowed.rs sys/by_hand.rs sys/context.rs sys/host.rs sys/stream.rs \
         sys/window.rs",
        "the functions of the driver, and the objects that they make, which call them by its macros",
    ),
    ("python", "device.rs memory.rs", "memory.rs, the file with unsafe code, lends the memory of both"),
    ("vfio", "container.rs device.rs", "a container opens its devices, and an open device keeps its container"),
    ("vm", "plan.rs vm.rs", "a plan borrows the VM that it changes"),
];

#[test]
fn modules_read_one_way() {
    let mut wrong = Vec::new();
    for c in CRATES {
        let src = root().join("crates").join(c.dir).join("src");
        let files: BTreeMap<String, String> = files(&[&format!("crates/{}/src", c.dir)])
            .into_iter()
            .filter(|path| path.extension().is_some_and(|e| e == "rs"))
            .map(|path| (path.strip_prefix(&src).unwrap().to_string_lossy().into_owned(), read(&path)))
            .collect();
        let program =
            |file: &&String| file.as_str() == "main.rs" || file.starts_with("bin/") && file.ends_with("/main.rs");
        let roots = files.keys().filter(|file| *file == "lib.rs" || program(file));
        let found: Vec<Circle> = roots.flat_map(|root| circles(&files, root)).collect();
        let allowed: Vec<&str> = ALLOWED.iter().filter(|(of, ..)| *of == c.dir).map(|(_, files, _)| *files).collect();
        wrong.extend(differences(&found, &allowed).iter().map(|line| format!("crates/{}: {line}", c.dir)));
    }
    report(&wrong);
}

/// Circles that are not allowed, and allowed files that lie in none.
fn differences(found: &[Circle], allowed: &[&str]) -> Vec<String> {
    let listed = |circle: &&Circle| {
        allowed.iter().any(|files| circle.files.iter().all(|f| files.split(' ').any(|file| file == f)))
    };
    let unlisted = found.iter().filter(|circle| !listed(circle));
    let unlisted =
        unlisted.map(|c| format!("{} name each other:\n      {}", c.files.join(", "), c.arrows.join("\n      ")));
    let straight = |file: &&str| !found.iter().any(|circle| circle.files.iter().any(|f| f == file));
    let stale = allowed.iter().flat_map(|files| files.split(' ')).filter(straight);
    let stale = stale.map(|file| format!("{file} lies in no circle: take it out of ALLOWED"));
    unlisted.chain(stale).collect()
}

/// Files in a circle, and what each takes from which other.
struct Circle {
    files: Vec<String>,
    arrows: Vec<String>,
}

/// The circles among the files of a crate: its text by path below `src`, and the root (`lib.rs`).
fn circles(files: &BTreeMap<String, String>, root: &str) -> Vec<Circle> {
    let tree = Tree::read(files, root);
    let arrows = tree.arrows();
    let mut reached: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for &(from, _) in arrows.keys() {
        let mut pending = vec![from];
        let found = reached.entry(from).or_default();
        while let Some(at) = pending.pop() {
            pending
                .extend(arrows.keys().filter(|(from, _)| *from == at).map(|(_, to)| *to).filter(|to| found.insert(to)));
        }
    }
    let both = |a: &str, b: &str| reached.get(a).is_some_and(|r| r.contains(b)) && reached[b].contains(a);
    let mut circles: Vec<Circle> = Vec::new();
    for &file in reached.keys().filter(|file| both(file, file)) {
        if circles.iter().any(|c| c.files.iter().any(|f| f == file)) {
            continue;
        }
        let within: Vec<&str> = reached.keys().copied().filter(|other| both(file, other)).collect();
        let inner = arrows.iter().filter(|((from, to), _)| within.contains(from) && within.contains(to));
        let line = |((from, to), names): (&(&str, &str), &BTreeSet<&str>)| {
            format!("{from} -> {to}: {}", names.iter().copied().collect::<Vec<_>>().join(", "))
        };
        circles
            .push(Circle { files: within.iter().map(|&f| f.to_owned()).collect(), arrows: inner.map(line).collect() });
    }
    circles
}

/// Segments of a path, as written.
type Path = Vec<String>;

/// The modules of a crate, the root first.
struct Tree {
    modules: Vec<Module>,
    /// The module that defines each macro: they are called by name from anywhere.
    macros: BTreeMap<String, usize>,
}

/// A module: a file, or a part of one.
struct Module {
    file: String,
    /// Where the files of its children are.
    directory: String,
    parent: usize,
    children: BTreeMap<String, usize>,
    defines: BTreeSet<String>,
    /// Names that `use` brings in, re-exports included.
    uses: BTreeMap<String, Path>,
    globs: Vec<Path>,
    /// Paths in code.
    paths: BTreeSet<Path>,
    /// Single words in code: they may come from a glob.
    words: BTreeSet<String>,
    /// Macros that are called.
    calls: BTreeSet<String>,
    /// False if it only declares modules and imports.
    holds: bool,
}

/// What a path names.
#[derive(Clone, Copy)]
enum Named {
    Module(usize),
    /// An item of this module.
    Item(usize),
    /// Something of another crate.
    Outside,
}

impl Tree {
    fn read(files: &BTreeMap<String, String>, root: &str) -> Self {
        let mut tree = Self { modules: Vec::new(), macros: BTreeMap::new() };
        let directory = root.rsplit_once('/').map_or(String::new(), |(directory, _)| format!("{directory}/"));
        tree.add(root.to_owned(), directory, 0);
        tree.read_module(files, 0, &tokens(&code_only(&files[root])));
        tree
    }

    fn add(&mut self, file: String, directory: String, parent: usize) -> usize {
        self.modules.push(Module {
            file,
            directory,
            parent,
            children: BTreeMap::new(),
            defines: BTreeSet::new(),
            uses: BTreeMap::new(),
            globs: Vec::new(),
            paths: BTreeSet::new(),
            words: BTreeSet::new(),
            calls: BTreeSet::new(),
            holds: false,
        });
        self.modules.len() - 1
    }

    /// Reads the tokens of a module, and the modules below it.
    fn read_module(&mut self, files: &BTreeMap<String, String>, at: usize, tokens: &[&str]) {
        let (mut i, mut depth) = (0, 0);
        let token = |i: usize| tokens.get(i).copied().unwrap_or_default();
        while i < tokens.len() {
            let next = token(i + 1);
            match tokens[i] {
                "#" if tests_follow(&tokens[i..]) => {
                    i += end_of_item(&tokens[i..]);
                    continue;
                }
                "use" if next != "<" => {
                    let end = i + tokens[i..].iter().position(|t| *t == ";").unwrap_or(tokens.len() - i);
                    for (name, path) in imports(&tokens[i + 1..end]) {
                        match name.as_str() {
                            "*" => self.modules[at].globs.push(path),
                            _ => drop(self.modules[at].uses.insert(name, path)),
                        }
                    }
                    i = end;
                    continue;
                }
                "mod" if token(i + 2) == "{" => {
                    let end = i + 2 + end_of_block(&tokens[i + 2..]);
                    let Module { file, directory, .. } = &self.modules[at];
                    let child = self.add(file.clone(), format!("{directory}{next}/"), at);
                    self.modules[at].children.insert(next.to_owned(), child);
                    self.read_module(files, child, &tokens[i + 3..end - 1]);
                    i = end;
                    continue;
                }
                "mod" if token(i + 2) == ";" => {
                    let directory = self.modules[at].directory.clone();
                    let candidates = [format!("{directory}{next}.rs"), format!("{directory}{next}/mod.rs")];
                    if let Some(file) = candidates.into_iter().find(|file| files.contains_key(file)) {
                        let code = code_only(&files[&file]);
                        let child = self.add(file, format!("{directory}{next}/"), at);
                        self.modules[at].children.insert(next.to_owned(), child);
                        self.read_module(files, child, &self::tokens(&code));
                    }
                    i += 2;
                    continue;
                }
                "{" => depth += 1,
                "}" => depth -= 1,
                "struct" | "enum" | "trait" | "type" | "union" | "fn" | "const" | "static" if depth == 0 => {
                    self.modules[at].holds = true;
                    self.modules[at].defines.insert(next.to_owned());
                }
                "impl" => self.modules[at].holds = true,
                "macro_rules" => {
                    self.modules[at].holds = true;
                    self.modules[at].defines.insert(token(i + 2).to_owned());
                    self.macros.insert(token(i + 2).to_owned(), at);
                }
                word if is_word(word) && next == "!" && matches!(token(i + 2), "(" | "[" | "{") => {
                    self.modules[at].holds |= depth == 0;
                    self.modules[at].calls.insert(word.to_owned());
                }
                word if is_word(word) && next == "::" => {
                    let mut path = vec![word.to_owned()];
                    while token(i + 1) == "::" && is_word(token(i + 2)) {
                        path.push(token(i + 2).to_owned());
                        i += 2;
                    }
                    self.modules[at].paths.insert(path);
                }
                word if is_word(word) => drop(self.modules[at].words.insert(word.to_owned())),
                _ => {}
            }
            i += 1;
        }
    }

    /// What each file takes from each other: the names, as the first wrote them.
    fn arrows(&self) -> BTreeMap<(&str, &str), BTreeSet<&str>> {
        let holds: BTreeSet<&str> = self.modules.iter().filter(|m| m.holds).map(|m| m.file.as_str()).collect();
        let mut arrows: BTreeMap<(&str, &str), BTreeSet<&str>> = BTreeMap::new();
        for (at, module) in self.modules.iter().enumerate() {
            let mut arrow = |named: Named, name: &'_ str| {
                let (Named::Module(to) | Named::Item(to)) = named else { return };
                let to = self.modules[to].file.as_str();
                if to != module.file && holds.contains(to) && holds.contains(module.file.as_str()) {
                    let known = self.name(module, name);
                    arrows.entry((&module.file, to)).or_default().insert(known);
                }
            };
            for path in module.uses.values().chain(&module.paths) {
                arrow(self.resolve(at, path, 0), path.last().map_or("", String::as_str));
            }
            for word in &module.words {
                if !module.uses.contains_key(word)
                    && !module.defines.contains(word)
                    && !module.children.contains_key(word)
                {
                    arrow(self.in_globs(at, word, 0).unwrap_or(Named::Outside), word);
                }
            }
            for call in &module.calls {
                if !module.uses.contains_key(call) {
                    arrow(self.macros.get(call).map_or(Named::Outside, |&m| Named::Item(m)), call);
                }
            }
        }
        arrows
    }

    fn name<'a>(&'a self, module: &'a Module, name: &str) -> &'a str {
        let written = module.uses.values().chain(&module.paths).flatten().chain(&module.words).chain(&module.calls);
        written.map(String::as_str).find(|written| *written == name).unwrap_or_default()
    }

    /// Follows a path that module `at` wrote. `depth` bounds imports that name each other.
    fn resolve(&self, at: usize, path: &[String], depth: usize) -> Named {
        let mut named = match path[0].as_str() {
            "crate" => Named::Module(0),
            "self" => Named::Module(at),
            "super" => Named::Module(self.modules[at].parent),
            first => self.lookup(at, first, depth).unwrap_or(Named::Outside),
        };
        for segment in &path[1..] {
            let Named::Module(module) = named else { break };
            named = match segment.as_str() {
                "super" => Named::Module(self.modules[module].parent),
                // What is not found was made by a macro there.
                segment => self.lookup(module, segment, depth).unwrap_or(Named::Item(module)),
            };
        }
        named
    }

    /// A name in the scope of a module.
    fn lookup(&self, at: usize, name: &str, depth: usize) -> Option<Named> {
        let module = &self.modules[at];
        if let Some(&child) = module.children.get(name) {
            Some(Named::Module(child))
        } else if module.defines.contains(name) {
            Some(Named::Item(at))
        } else if let Some(path) = module.uses.get(name).filter(|_| depth < 16) {
            // `use error::error` names the outer one.
            let outside = path[0] == name && !module.children.contains_key(name);
            Some(if outside { Named::Outside } else { self.resolve(at, path, depth + 1) })
        } else {
            self.in_globs(at, name, depth)
        }
    }

    fn in_globs(&self, at: usize, name: &str, depth: usize) -> Option<Named> {
        self.modules[at].globs.iter().filter(|_| depth < 16).find_map(|glob| match self.resolve(at, glob, depth + 1) {
            Named::Module(module) if module != at => self.lookup(module, name, depth + 1),
            _ => None,
        })
    }
}

/// True if an attribute begins here that leaves what follows to tests.
fn tests_follow(tokens: &[&str]) -> bool {
    let attribute = &tokens[..end_of_attribute(tokens)];
    tokens.starts_with(&["#", "[", "cfg"]) && attribute.contains(&"test") && !attribute.contains(&"not")
}

fn end_of_attribute(tokens: &[&str]) -> usize {
    tokens.iter().position(|t| *t == "]").map_or(tokens.len(), |i| i + 1)
}

/// The end of the item that begins with attributes here: its block, its semicolon, or the end of what it is in.
fn end_of_item(tokens: &[&str]) -> usize {
    let mut i = 0;
    while tokens.get(i) == Some(&"#") {
        i += end_of_attribute(&tokens[i..]);
    }
    let mut depth = 0;
    while i < tokens.len() {
        match tokens[i] {
            "(" | "[" => depth += 1,
            ")" | "]" => depth -= 1,
            "{" if depth == 0 => return i + end_of_block(&tokens[i..]),
            ";" if depth == 0 => return i + 1,
            "}" => return i,
            _ => {}
        }
        i += 1;
    }
    i
}

/// The end of the block that opens here.
fn end_of_block(tokens: &[&str]) -> usize {
    let mut depth = 0;
    for (i, token) in tokens.iter().enumerate() {
        match *token {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return i + 1;
        }
    }
    tokens.len()
}

/// The names that a tree of imports brings in, each with its path; a glob is called `*`.
fn imports(tree: &[&str]) -> Vec<(String, Path)> {
    let mut found = Vec::new();
    let mut prefix = Path::new();
    let mut i = 0;
    while i < tree.len() {
        match tree[i] {
            "::" => {}
            "{" => {
                let end = i + end_of_block(&tree[i..]);
                // One branch after the other: commas inside of branches are of inner trees.
                let (mut start, mut depth) = (i + 1, 0);
                for j in i + 1..end {
                    match tree[j] {
                        "{" => depth += 1,
                        "}" if j + 1 < end => depth -= 1,
                        "," | "}" if depth == 0 => {
                            let branch = imports(&tree[start..j]);
                            found.extend(branch.into_iter().map(|(name, path)| (name, [&prefix[..], &path].concat())));
                            start = j + 1;
                        }
                        _ => {}
                    }
                }
                // `self` is the prefix itself.
                for (name, path) in &mut found {
                    if path.len() > 1 && path.last().is_some_and(|last| last == "self") {
                        path.pop();
                        if name == "self" {
                            *name = path.last().cloned().unwrap_or_default();
                        }
                    }
                }
                return found;
            }
            "*" => return vec![("*".to_owned(), prefix)],
            "as" => return vec![(tree.get(i + 1).copied().unwrap_or("_").to_owned(), prefix)],
            word => prefix.push(word.to_owned()),
        }
        i += 1;
    }
    found.extend(prefix.last().cloned().map(|name| (name, prefix)));
    found
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Words, `::`, and every other character that is no space.
fn tokens(code: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = code.trim_start();
    while let Some(first) = rest.chars().next() {
        let word = |c: char| c.is_alphanumeric() || c == '_';
        let len = if word(first) {
            rest.find(|c| !word(c)).unwrap_or(rest.len())
        } else if rest.starts_with("::") {
            2
        } else {
            first.len_utf8()
        };
        let (token, after) = rest.split_at(len);
        found.push(token);
        rest = after.trim_start();
    }
    found
}

/// The circles among these files of an imaginary crate.
fn circles_of(files: &[(&str, &str)]) -> Vec<Vec<String>> {
    let files: BTreeMap<String, String> =
        files.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect();
    circles(&files, "lib.rs").into_iter().map(|circle| circle.files).collect()
}

#[test]
fn a_circle_through_a_re_export_is_found() {
    let list = "mod a;\nmod error;\npub use self::error::{Error as Fault, Kind};\npub use a::*;";
    let of_error = "use crate::A;\npub struct Error(A);\npub enum Kind {}";
    for of_a in [
        "use crate::Fault;\npub struct A(Fault);",
        "use super::Kind;\npub struct A(Kind);",
        "pub struct A(crate::error::Error);",
        "use crate::{b::B, error::{self, Kind as K}};\npub struct A;",
        "use super::*;\npub struct A(Box<Fault>);",
        "pub struct A;\nmod inner {\n    fn f() -> super::super::Kind {}\n}",
    ] {
        let found = circles_of(&[("lib.rs", list), ("a.rs", of_a), ("error.rs", of_error)]);
        assert_eq!(found, [["a.rs", "error.rs"]], "{of_a}");
    }
}

#[test]
fn files_above_one_another_are_no_circle() {
    let list = "mod a;\nmod error;\npub use {error::Error, a::A};";
    let of_error = "use crate::a::A;\npub struct Error(A);";
    for of_a in [
        "pub struct A;",
        "// crate::Error\npub struct A(&'static str = \"crate::Error\");",
        "pub struct A;\n#[cfg(test)]\nmod tests {\n    use crate::Error;\n}",
        "pub struct A;\n#[cfg(test)]\nuse crate::Error;",
        "use outside::error::Error;\npub struct A(Error);",
        "use crate::a;\npub struct A(a::B);\npub struct B;",
    ] {
        let found = circles_of(&[("lib.rs", list), ("a.rs", of_a), ("error.rs", of_error)]);
        assert_eq!(found, [[""; 0]; 0], "{of_a}");
    }
}

#[test]
fn a_parent_that_holds_something_lies_in_circles() {
    let child = "use super::Parent;\npub struct Child(Parent);";
    let parent = |text| [("lib.rs", "mod p;"), ("p/mod.rs", text), ("p/child.rs", child)];
    let list = "mod child;\npub use child::Child;";
    assert_eq!(circles_of(&parent(list)), [[""; 0]; 0]);
    let both = format!("{list}\npub struct Parent;");
    assert_eq!(circles_of(&parent(&both)), [["p/child.rs", "p/mod.rs"]]);
}

#[test]
fn a_macro_ties_the_file_that_calls_it() {
    let list = "#[macro_use]\nmod a;\nmod b;";
    let of_a = "macro_rules! make { () => { $crate::b::B } }\npub struct A;";
    assert_eq!(
        circles_of(&[("lib.rs", list), ("a.rs", of_a), ("b.rs", "make!();\npub struct B;")]),
        [["a.rs", "b.rs"]]
    );
}

#[test]
fn what_the_list_does_not_name_is_reported() {
    let files =
        [("lib.rs", "mod a;\nmod b;"), ("a.rs", "use crate::b::B;\nstruct A;"), ("b.rs", "fn b(_: crate::a::A) {}")];
    let files = files.map(|(name, text)| (name.to_owned(), text.to_owned())).into();
    let found = circles(&files, "lib.rs");
    let differences = |allowed| differences(&found, allowed);
    assert_eq!(differences(&[]), ["a.rs, b.rs name each other:\n      a.rs -> b.rs: B\n      b.rs -> a.rs: A"]);
    assert_eq!(differences(&["a.rs b.rs"]), [""; 0]);
    assert_eq!(differences(&["a.rs b.rs c.rs"]), ["c.rs lies in no circle: take it out of ALLOWED"]);
}
