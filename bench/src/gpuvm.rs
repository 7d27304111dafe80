//! The bookkeeping of Linux's `drm_gpuvm` as far as binds and unbinds of pages need it, emulated.
//!
//! As in `drivers/gpu/drm/drm_gpuvm.c`: an object for each mapping, from the allocator and back to it; a red-black tree
//! of the mappings by address; a list of all of them in order, and one for each buffer; a count of references of the
//! buffer. A map looks for what it overlaps, takes that away and puts back what sticks out; an unmap does the same. On
//! request the objects of the worst case are allocated in advance and those that were not needed freed, three for a map
//! and two for an unmap, as Asahi's driver does it (`bind_object` and `unmap_range` of its `mmu.rs`).
//!
//! It is cheaper than the original in several ways: keys and links lie in one array; the tree does not keep the highest
//! end below each node; there are no locks.

use std::sync::Arc;

/// No node: the sentinel of the tree, always black.
const NIL: u32 = 0;

/// The record of a mapping without its place: with a node, the 120 bytes of `struct drm_gpuva`.
struct Object {
    bo: Option<Arc<u64>>,
    offset: u64,
    flags: u64,
    _driver: [u64; 5],
}

impl Object {
    /// A zeroed object, not filled in yet.
    fn boxed() -> Box<Self> {
        // The compiler must not notice when it is freed unused.
        std::hint::black_box(Box::new(Self { bo: None, offset: 0, flags: 0, _driver: [0; 5] }))
    }
}

struct Node {
    first: u64,
    last: u64,
    left: u32,
    right: u32,
    parent: u32,
    red: bool,
    /// Neighbours in the list of all mappings.
    before: u32,
    after: u32,
    /// Neighbours in the list of the buffer.
    bo_before: u32,
    bo_after: u32,
    object: Option<Box<Object>>,
}

impl Node {
    const EMPTY: Self = Self {
        first: 0,
        last: 0,
        left: NIL,
        right: NIL,
        parent: NIL,
        red: false,
        before: NIL,
        after: NIL,
        bo_before: NIL,
        bo_after: NIL,
        object: None,
    };
}

/// The mappings. One buffer, as in the original program.
pub struct GpuVm {
    nodes: Vec<Node>,
    free: Vec<u32>,
    root: u32,
    /// First of the list of all mappings, and of the list of the buffer.
    first: u32,
    bo_first: u32,
    bo: Arc<u64>,
    /// True when each operation allocates its worst case in advance.
    reserves: bool,
}

impl GpuVm {
    pub fn new(reserves: bool) -> Self {
        let nodes = vec![Node::EMPTY];
        Self { nodes, free: Vec::new(), root: NIL, first: NIL, bo_first: NIL, bo: Arc::new(1), reserves }
    }

    /// Maps `first..=last`; what was there goes.
    pub fn map(&mut self, first: u64, last: u64, offset: u64, flags: u64) {
        let mut new = Object::boxed();
        let parts = self.reserves.then(|| [Object::boxed(), Object::boxed()]);
        self.take(first, last, parts);
        (new.bo, new.offset, new.flags) = (Some(self.bo.clone()), offset, flags);
        self.insert(first, last, new);
    }

    /// Unmaps `first..=last`; what sticks out stays.
    pub fn unmap(&mut self, first: u64, last: u64) {
        let parts = self.reserves.then(|| [Object::boxed(), Object::boxed()]);
        self.take(first, last, parts);
    }

    fn take(&mut self, first: u64, last: u64, parts: Option<[Box<Object>; 2]>) {
        let mut parts = parts.into_iter().flatten();
        let mut at = self.overlap(first, last);
        while at != NIL {
            let next = self.nodes[at as usize].after;
            let (low, high) = (self.nodes[at as usize].first, self.nodes[at as usize].last);
            let Some(object) = self.remove(at) else { return };
            let mut part = |offset| {
                let mut part = parts.next().unwrap_or_else(Object::boxed);
                (part.bo, part.offset, part.flags) = (object.bo.clone(), offset, object.flags);
                part
            };
            if low < first {
                self.insert(low, first - 1, part(object.offset));
            }
            if high > last {
                self.insert(last + 1, high, part(object.offset + (last + 1 - low)));
                return;
            }
            at = if next != NIL && self.nodes[next as usize].first <= last { next } else { NIL };
        }
    }

    /// The lowest mapping with a byte in the range.
    fn overlap(&self, first: u64, last: u64) -> u32 {
        let (mut at, mut found) = (self.root, NIL);
        while at != NIL {
            let node = &self.nodes[at as usize];
            if node.last < first {
                at = node.right;
            } else {
                if node.first <= last {
                    found = at;
                }
                at = node.left;
            }
        }
        found
    }

    fn insert(&mut self, first: u64, last: u64, object: Box<Object>) {
        let new = Node { first, last, red: true, object: Some(object), ..Node::EMPTY };
        let id = match self.free.pop() {
            Some(id) => {
                self.nodes[id as usize] = new;
                id
            }
            None => {
                self.nodes.push(new);
                (self.nodes.len() - 1) as u32
            }
        };
        // The place in the tree, and the mapping before it.
        let (mut parent, mut at, mut before) = (NIL, self.root, NIL);
        while at != NIL {
            parent = at;
            let node = &self.nodes[at as usize];
            if first < node.first {
                at = node.left;
            } else {
                before = at;
                at = node.right;
            }
        }
        self.nodes[id as usize].parent = parent;
        match parent {
            NIL => self.root = id,
            p if first < self.nodes[p as usize].first => self.nodes[p as usize].left = id,
            p => self.nodes[p as usize].right = id,
        }
        self.after_insert(id);
        let after = if before == NIL { self.first } else { self.nodes[before as usize].after };
        self.nodes[id as usize].before = before;
        self.nodes[id as usize].after = after;
        match before {
            NIL => self.first = id,
            b => self.nodes[b as usize].after = id,
        }
        if after != NIL {
            self.nodes[after as usize].before = id;
        }
        let head = self.bo_first;
        self.nodes[id as usize].bo_after = head;
        if head != NIL {
            self.nodes[head as usize].bo_before = id;
        }
        self.bo_first = id;
    }

    fn remove(&mut self, id: u32) -> Option<Box<Object>> {
        self.take_from_tree(id);
        let node = &mut self.nodes[id as usize];
        let (before, after, bo_before, bo_after) = (node.before, node.after, node.bo_before, node.bo_after);
        let object = node.object.take();
        match before {
            NIL => self.first = after,
            b => self.nodes[b as usize].after = after,
        }
        if after != NIL {
            self.nodes[after as usize].before = before;
        }
        match bo_before {
            NIL => self.bo_first = bo_after,
            b => self.nodes[b as usize].bo_after = bo_after,
        }
        if bo_after != NIL {
            self.nodes[bo_after as usize].bo_before = bo_before;
        }
        self.free.push(id);
        object
    }

    /// The tree, as in Cormen, Leiserson, Rivest and Stein, chapter 13.
    fn rotate_left(&mut self, x: u32) {
        let y = self.nodes[x as usize].right;
        let inner = self.nodes[y as usize].left;
        self.nodes[x as usize].right = inner;
        if inner != NIL {
            self.nodes[inner as usize].parent = x;
        }
        self.replace_child(x, y);
        self.nodes[y as usize].left = x;
        self.nodes[x as usize].parent = y;
    }

    fn rotate_right(&mut self, x: u32) {
        let y = self.nodes[x as usize].left;
        let inner = self.nodes[y as usize].right;
        self.nodes[x as usize].left = inner;
        if inner != NIL {
            self.nodes[inner as usize].parent = x;
        }
        self.replace_child(x, y);
        self.nodes[y as usize].right = x;
        self.nodes[x as usize].parent = y;
    }

    /// `y` takes the place of `x` below its parent.
    fn replace_child(&mut self, x: u32, y: u32) {
        let parent = self.nodes[x as usize].parent;
        self.nodes[y as usize].parent = parent; // that of the sentinel, too, which the removal needs
        match parent {
            NIL => self.root = y,
            p if self.nodes[p as usize].left == x => self.nodes[p as usize].left = y,
            p => self.nodes[p as usize].right = y,
        }
    }

    fn is_red(&self, id: u32) -> bool {
        self.nodes[id as usize].red
    }

    fn after_insert(&mut self, mut z: u32) {
        loop {
            let parent = self.nodes[z as usize].parent;
            if !self.is_red(parent) {
                break;
            }
            let grand = self.nodes[parent as usize].parent;
            let left = self.nodes[grand as usize].left == parent;
            let uncle = if left { self.nodes[grand as usize].right } else { self.nodes[grand as usize].left };
            if self.is_red(uncle) {
                self.nodes[parent as usize].red = false;
                self.nodes[uncle as usize].red = false;
                self.nodes[grand as usize].red = true;
                z = grand;
                continue;
            }
            let mut parent = parent;
            if left && self.nodes[parent as usize].right == z {
                self.rotate_left(parent);
                parent = z;
            } else if !left && self.nodes[parent as usize].left == z {
                self.rotate_right(parent);
                parent = z;
            }
            self.nodes[parent as usize].red = false;
            self.nodes[grand as usize].red = true;
            if left {
                self.rotate_right(grand);
            } else {
                self.rotate_left(grand);
            }
            break;
        }
        let root = self.root;
        self.nodes[root as usize].red = false;
    }

    fn take_from_tree(&mut self, z: u32) {
        let (left, right) = (self.nodes[z as usize].left, self.nodes[z as usize].right);
        let was_red;
        let x;
        if left == NIL {
            (x, was_red) = (right, self.is_red(z));
            self.replace_child(z, right);
        } else if right == NIL {
            (x, was_red) = (left, self.is_red(z));
            self.replace_child(z, left);
        } else {
            let mut y = right;
            while self.nodes[y as usize].left != NIL {
                y = self.nodes[y as usize].left;
            }
            was_red = self.is_red(y);
            x = self.nodes[y as usize].right;
            if self.nodes[y as usize].parent == z {
                self.nodes[x as usize].parent = y;
            } else {
                self.replace_child(y, x);
                self.nodes[y as usize].right = right;
                self.nodes[right as usize].parent = y;
            }
            self.replace_child(z, y);
            self.nodes[y as usize].left = left;
            self.nodes[left as usize].parent = y;
            self.nodes[y as usize].red = self.is_red(z);
        }
        if !was_red {
            self.after_remove(x);
        }
    }

    fn after_remove(&mut self, mut x: u32) {
        while x != self.root && !self.is_red(x) {
            let parent = self.nodes[x as usize].parent;
            let left = self.nodes[parent as usize].left == x;
            let sibling = |vm: &Self| {
                let p = &vm.nodes[parent as usize];
                if left { p.right } else { p.left }
            };
            let mut w = sibling(self);
            if self.is_red(w) {
                self.nodes[w as usize].red = false;
                self.nodes[parent as usize].red = true;
                if left {
                    self.rotate_left(parent);
                } else {
                    self.rotate_right(parent);
                }
                w = sibling(self);
            }
            let (near, far) = {
                let node = &self.nodes[w as usize];
                if left { (node.left, node.right) } else { (node.right, node.left) }
            };
            if !self.is_red(near) && !self.is_red(far) {
                self.nodes[w as usize].red = true;
                x = parent;
                continue;
            }
            if !self.is_red(far) {
                self.nodes[near as usize].red = false;
                self.nodes[w as usize].red = true;
                if left {
                    self.rotate_right(w);
                } else {
                    self.rotate_left(w);
                }
                w = sibling(self);
            }
            self.nodes[w as usize].red = self.is_red(parent);
            self.nodes[parent as usize].red = false;
            let far = if left { self.nodes[w as usize].right } else { self.nodes[w as usize].left };
            self.nodes[far as usize].red = false;
            if left {
                self.rotate_left(parent);
            } else {
                self.rotate_right(parent);
            }
            x = self.root;
        }
        self.nodes[x as usize].red = false;
    }

    /// The mappings by address as (first, last, offset), if the tree is sound and the lists agree with it.
    pub fn check(&self) -> Result<Vec<(u64, u64, u64)>, String> {
        let mut found = Vec::new();
        self.check_below(self.root, &mut found)?;
        let (mut at, mut listed) = (self.first, Vec::new());
        while at != NIL {
            listed.push(at);
            at = self.nodes[at as usize].after;
        }
        let (mut at, mut of_bo) = (self.bo_first, 0);
        while at != NIL {
            of_bo += 1;
            at = self.nodes[at as usize].bo_after;
        }
        if listed != found || of_bo != found.len() || Arc::strong_count(&self.bo) != found.len() + 1 {
            return Err("the lists and the tree of drm_gpuvm differ".into());
        }
        let mapping = |&id: &u32| {
            let node = &self.nodes[id as usize];
            (node.first, node.last, node.object.as_ref().map_or(u64::MAX, |o| o.offset))
        };
        Ok(found.iter().map(mapping).collect())
    }

    /// Adds the nodes below in order, and gives how many black ones are on the way down.
    fn check_below(&self, id: u32, found: &mut Vec<u32>) -> Result<usize, String> {
        if id == NIL {
            return Ok(1);
        }
        let node = &self.nodes[id as usize];
        let left = self.check_below(node.left, found)?;
        found.push(id);
        let right = self.check_below(node.right, found)?;
        if left != right || node.red && (self.is_red(node.left) || self.is_red(node.right)) {
            return Err("the tree of drm_gpuvm is out of balance".into());
        }
        Ok(left + usize::from(!node.red))
    }
}
