// SPDX-License-Identifier: GPL-2.0-only OR MIT
/*
 * A stub of AMD's driver SLASH for the guests of scripts/vm: the ioctl numbers, structures and checks of its queue
 * pairs and buffers, with card memory in kernel pages and the processor as the DMA engine. Written for the tests of
 * dmalane; nothing of SLASH is in it. Interface: SLASH, branch dev,
 * driver/libslash/include/slash/uapi/slash_interface.h.
 *
 * Parameters in /sys/module/slash_stub/parameters:
 *   delay_ms   time that each transfer waits before it moves bytes
 *   hang       transfers do not end before their queue pair is stopped
 *   buffers, pairs, ioctls, commands   what exists, and the transfers so far by ioctl and by io_uring command
 */
#include <linux/anon_inodes.h>
#include <linux/delay.h>
#include <linux/fs.h>
#include <linux/highmem.h>
#include <linux/io_uring/cmd.h>
#include <linux/kref.h>
#include <linux/miscdevice.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/slab.h>
#include <linux/uaccess.h>
#include <linux/version.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>

/* The completion of a command has had another form since then. SLASH itself has no commands there either. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 18, 0)
#define HAVE_COMMANDS
#endif

#define MAX_PAIRS 256
#define MAX_PARTS 2
#define HBM_FIRST 0x4000000000ULL
#define DDR_FIRST 0x60000000000ULL
#define MEMORY_LEN (32ULL << 30)

struct info { u32 size, qsets_max, msix_qvecs, vf_max, caps; char bdf[32]; };
struct pair_add { u32 size, mode, dirs, channel, h2c, c2h, cmpt, qid, aperture; };
struct pair_op { u32 size, qid, op; };
struct pair_fd { u32 size, qid, flags, count, ids[MAX_PARTS]; };
struct buf_create { u32 size, flags; u64 length; u32 granule, hint; };
struct part { u32 pair, way; s32 fd; u32 pad; u64 offset, at, len; };
struct transfer { u32 size, count; struct part parts[MAX_PARTS]; };

#define INFO _IOC(_IOC_READ | _IOC_WRITE, 'v', 0x50, 20)
#define PAIR_ADD _IOWR('v', 0x51, struct pair_add)
#define PAIR_OP _IOWR('v', 0x52, struct pair_op)
#define PAIR_FD _IOWR('v', 0x53, struct pair_fd)
#define BUF_CREATE _IOWR('v', 0x54, struct buf_create)
#define TRANSFER _IOWR('v', 0x56, struct transfer)
#define COMMAND 0x56

static uint delay_ms;
module_param(delay_ms, uint, 0644);
static bool hang;
module_param(hang, bool, 0644);
static int buffers, pairs, ioctls, commands;
module_param(buffers, int, 0444);
module_param(pairs, int, 0444);
module_param(ioctls, int, 0444);
module_param(commands, int, 0444);

/* A queue pair: of the table until it is deleted, and of the files that were opened for it. */
struct pair {
	struct kref ref;
	u32 dirs;
	bool running;
	int in_flight;
};

struct pair_file {
	u32 count;
	struct pair *pairs[MAX_PARTS];
};

struct buf {
	u64 len;
	unsigned long count;
	struct page **pages;
};

/* A transfer that was checked. Its files stay open until it has ended. */
struct job {
	struct work_struct work;
	struct io_uring_cmd *cmd;
	u32 count;
	long result;
	struct part parts[MAX_PARTS];
	struct file *files[MAX_PARTS];
	struct pair *pairs[MAX_PARTS];
};

static DEFINE_MUTEX(lock);
static DEFINE_XARRAY_ALLOC(table);
static DEFINE_XARRAY(memory);
static DECLARE_WAIT_QUEUE_HEAD(changed);
static struct workqueue_struct *queue;

static void pair_free(struct kref *ref)
{
	kfree(container_of(ref, struct pair, ref));
}

/* Copies a structure of which the caller has another length; the caller's is the first word. */
static int take(void *ours, size_t len, size_t least, void __user *user, u32 *size)
{
	memset(ours, 0, len);
	if (get_user(*size, (u32 __user *)user))
		return -EFAULT;
	if (*size < least)
		return -EINVAL;
	return copy_from_user(ours, user, min_t(size_t, *size, len)) ? -EFAULT : 0;
}

static int give(void *ours, size_t len, void __user *user, u32 size)
{
	*(u32 *)ours = len;
	if (copy_to_user(user, ours, min_t(size_t, size, len)))
		return -EFAULT;
	return size > len && clear_user(user + len, size - len) ? -EFAULT : 0;
}

/* The page of card memory that holds an address, made when it is first used. */
static struct page *card_page(u64 at)
{
	struct page *page = xa_load(&memory, at >> PAGE_SHIFT), *other;

	if (page)
		return page;
	page = alloc_page(GFP_KERNEL | __GFP_ZERO);
	if (!page)
		return NULL;
	other = xa_cmpxchg(&memory, at >> PAGE_SHIFT, NULL, page, GFP_KERNEL);
	if (!other)
		return page;
	__free_page(page);
	return xa_is_err(other) ? NULL : other;
}

static long move(struct buf *buf, const struct part *part)
{
	u64 done = 0;

	while (done < part->len) {
		u64 host = part->offset + done, card = part->at + done;
		size_t n = min3(part->len - done, PAGE_SIZE - (u64)offset_in_page(host), PAGE_SIZE - (u64)offset_in_page(card));
		struct page *there = card_page(card);
		void *ours, *theirs;

		if (!there)
			return -ENOMEM;
		ours = page_address(buf->pages[host >> PAGE_SHIFT]) + offset_in_page(host);
		theirs = page_address(there) + offset_in_page(card);
		if (part->way == 1)
			memcpy(theirs, ours, n);
		else
			memcpy(ours, theirs, n);
		done += n;
		cond_resched();
	}
	return part->len;
}

static long do_job(struct job *job)
{
	long total = 0;
	u32 i;

	if (delay_ms)
		msleep(delay_ms);
	for (i = 0; i < job->count && total >= 0; i++) {
		struct pair *pair = job->pairs[i];
		long moved;

		if (hang)
			wait_event(changed, !READ_ONCE(pair->running));
		moved = READ_ONCE(pair->running) ? move(job->files[i]->private_data, &job->parts[i]) : -ENXIO;
		total = moved < 0 ? moved : total + moved;
	}
	return total;
}

static void end_job(struct job *job)
{
	u32 i;

	for (i = 0; i < job->count; i++) {
		mutex_lock(&lock);
		job->pairs[i]->in_flight--;
		mutex_unlock(&lock);
		wake_up_all(&changed);
		kref_put(&job->pairs[i]->ref, pair_free);
		fput(job->files[i]);
	}
}

static const struct file_operations buf_fops;

static int add_part(struct job *job, struct pair_file *file, const struct part *part)
{
	struct file *host;
	struct pair *pair;
	struct buf *buf;
	u64 base = part->at >= DDR_FIRST ? DDR_FIRST : HBM_FIRST;
	int error = 0;

	if (part->pair >= file->count || part->way < 1 || part->way > 2 || !part->len || part->len > U32_MAX)
		return -EINVAL;
	host = fget(part->fd);
	if (!host)
		return -EBADF;
	buf = host->private_data;
	if (host->f_op != &buf_fops || !PAGE_ALIGNED(part->offset) || part->offset > buf->len ||
	    part->len > buf->len - part->offset)
		error = -EINVAL;
	else if (part->at < base || part->at - base > MEMORY_LEN || part->len > MEMORY_LEN - (part->at - base))
		error = -EIO;
	pair = file->pairs[part->pair];
	mutex_lock(&lock);
	if (!error && (!pair->running || !(pair->dirs & part->way)))
		error = -ENODEV;
	if (!error) {
		pair->in_flight++;
		kref_get(&pair->ref);
	}
	mutex_unlock(&lock);
	if (error) {
		fput(host);
		return error;
	}
	job->parts[job->count] = *part;
	job->files[job->count] = host;
	job->pairs[job->count++] = pair;
	return 0;
}

static struct job *make_job(struct pair_file *file, void __user *user)
{
	struct transfer *asked;
	struct job *job;
	u32 size, i;
	int error = -ENOMEM;

	asked = kzalloc(sizeof(*asked), GFP_KERNEL);
	job = kzalloc(sizeof(*job), GFP_KERNEL);
	if (asked && job)
		error = take(asked, sizeof(*asked), 8, user, &size);
	if (!error && (!asked->count || asked->count > MAX_PARTS))
		error = -EINVAL;
	for (i = 0; !error && i < asked->count; i++)
		error = add_part(job, file, &asked->parts[i]);
	kfree(asked);
	if (!error)
		return job;
	if (job)
		end_job(job);
	kfree(job);
	return ERR_PTR(error);
}

static long transfer(struct pair_file *file, void __user *user)
{
	struct job *job = make_job(file, user);
	long result;

	if (IS_ERR(job))
		return PTR_ERR(job);
	ioctls++;
	result = do_job(job);
	end_job(job);
	kfree(job);
	return result;
}

#ifdef HAVE_COMMANDS
static void command_ends(struct io_uring_cmd *cmd, unsigned int issue_flags)
{
	struct job *job = *(struct job **)cmd->pdu;
	long result = job->result;

	kfree(job);
	io_uring_cmd_done(cmd, result, 0, issue_flags);
}

static void command_works(struct work_struct *work)
{
	struct job *job = container_of(work, struct job, work);

	job->result = do_job(job);
	end_job(job);
	io_uring_cmd_complete_in_task(job->cmd, command_ends);
}

static int pair_command(struct io_uring_cmd *cmd, unsigned int issue_flags)
{
	struct job *job;
	u64 user;

	if (cmd->cmd_op != COMMAND)
		return -EOPNOTSUPP;
	if (issue_flags & IO_URING_F_NONBLOCK)
		return -EAGAIN;
	memcpy(&user, io_uring_sqe_cmd(cmd->sqe), sizeof(user));
	job = make_job(cmd->file->private_data, u64_to_user_ptr(user));
	if (IS_ERR(job))
		return PTR_ERR(job);
	commands++;
	job->cmd = cmd;
	*(struct job **)cmd->pdu = job;
	INIT_WORK(&job->work, command_works);
	queue_work(queue, &job->work);
	return -EIOCBQUEUED;
}
#endif

static void buf_free(struct buf *buf)
{
	while (buf->count)
		__free_page(buf->pages[--buf->count]);
	kvfree(buf->pages);
	kfree(buf);
}

static int buf_release(struct inode *inode, struct file *file)
{
	buf_free(file->private_data);
	mutex_lock(&lock);
	buffers--;
	mutex_unlock(&lock);
	return 0;
}

static int buf_mmap(struct file *file, struct vm_area_struct *vma)
{
	struct buf *buf = file->private_data;

	if (vma->vm_pgoff || vma->vm_end - vma->vm_start != buf->len || !(vma->vm_flags & VM_SHARED))
		return -EINVAL;
	return vm_map_pages_zero(vma, buf->pages, buf->count);
}

static const struct file_operations buf_fops = {
	.owner = THIS_MODULE,
	.release = buf_release,
	.mmap = buf_mmap,
};

static int buf_create(void __user *user)
{
	struct buf_create asked;
	struct buf *buf;
	unsigned long count;
	u32 size;
	int error = take(&asked, sizeof(asked), 16, user, &size), fd;

	if (error)
		return error;
	if (asked.flags & ~O_CLOEXEC || !asked.length || !PAGE_ALIGNED(asked.length) || asked.length > MEMORY_LEN)
		return -EINVAL;
	count = asked.length >> PAGE_SHIFT;
	buf = kzalloc(sizeof(*buf), GFP_KERNEL);
	if (!buf)
		return -ENOMEM;
	buf->len = asked.length;
	buf->pages = kvcalloc(count, sizeof(*buf->pages), GFP_KERNEL);
	while (buf->pages && buf->count < count) {
		buf->pages[buf->count] = alloc_page(GFP_KERNEL | __GFP_ZERO);
		if (!buf->pages[buf->count])
			break;
		buf->count++;
	}
	asked.granule = PAGE_SIZE;
	asked.hint = 2;
	if (!buf->pages || buf->count < count)
		error = -ENOMEM;
	else
		error = give(&asked, sizeof(asked), user, size);
	fd = error ? error : anon_inode_getfd("slash_qdma_buf", &buf_fops, buf, O_RDWR | asked.flags);
	if (fd < 0) {
		buf_free(buf);
		return fd;
	}
	mutex_lock(&lock);
	buffers++;
	mutex_unlock(&lock);
	return fd;
}

static long pair_ioctl(struct file *file, unsigned int number, unsigned long user)
{
	switch (number) {
	case BUF_CREATE:
		return buf_create((void __user *)user);
	case TRANSFER:
		return transfer(file->private_data, (void __user *)user);
	default:
		return -ENOTTY;
	}
}

static void pair_file_free(struct pair_file *file)
{
	while (file->count)
		kref_put(&file->pairs[--file->count]->ref, pair_free);
	kfree(file);
}

static int pair_release(struct inode *inode, struct file *file)
{
	pair_file_free(file->private_data);
	return 0;
}

static const struct file_operations pair_fops = {
	.owner = THIS_MODULE,
	.release = pair_release,
	.unlocked_ioctl = pair_ioctl,
#ifdef HAVE_COMMANDS
	.uring_cmd = pair_command,
#endif
};

static int pair_add(void __user *user)
{
	struct pair_add asked;
	struct pair *pair;
	u32 size;
	int error = take(&asked, sizeof(asked), offsetofend(struct pair_add, cmpt), user, &size);

	if (error)
		return error;
	if (!asked.dirs || asked.dirs > 7 || asked.mode > 1 || asked.channel > 2 || asked.h2c > 15 || asked.c2h > 15 ||
	    asked.cmpt > 15)
		return -EINVAL;
	pair = kzalloc(sizeof(*pair), GFP_KERNEL);
	if (!pair)
		return -ENOMEM;
	kref_init(&pair->ref);
	pair->dirs = asked.dirs;
	error = xa_alloc(&table, &asked.qid, pair, XA_LIMIT(0, MAX_PAIRS - 1), GFP_KERNEL);
	if (error) {
		kfree(pair);
		return error;
	}
	mutex_lock(&lock);
	pairs++;
	mutex_unlock(&lock);
	return give(&asked, sizeof(asked), user, size);
}

/* Start, stop or delete. A stop waits for what is in flight. */
static int pair_op(void __user *user)
{
	struct pair_op asked;
	struct pair *pair;
	u32 size;
	int error = take(&asked, sizeof(asked), sizeof(asked), user, &size);

	if (error)
		return error;
	if (asked.op > 2)
		return -EINVAL;
	mutex_lock(&lock);
	pair = xa_load(&table, asked.qid);
	if (!pair)
		error = -ENOENT;
	else if (asked.op < 2 && pair->running == !asked.op)
		error = -EINVAL;
	else
		WRITE_ONCE(pair->running, !asked.op);
	if (!error && asked.op == 2) {
		xa_erase(&table, asked.qid);
		pairs--;
	} else if (!error) {
		kref_get(&pair->ref);
	}
	mutex_unlock(&lock);
	if (error)
		return error;
	wake_up_all(&changed);
	if (asked.op)
		wait_event(changed, !READ_ONCE(pair->in_flight));
	/* A deleted pair has lost the reference of the table. */
	kref_put(&pair->ref, pair_free);
	return give(&asked, sizeof(asked), user, size);
}

static int pair_fd(void __user *user)
{
	struct pair_fd asked;
	struct pair_file *file;
	u32 size, i, count;
	int error = take(&asked, sizeof(asked), 12, user, &size), fd;

	if (error)
		return error;
	if (asked.flags & ~O_CLOEXEC || asked.count > MAX_PARTS)
		return -EINVAL;
	if (!asked.count)
		asked.ids[0] = asked.qid;
	count = max(asked.count, 1U);
	file = kzalloc(sizeof(*file), GFP_KERNEL);
	if (!file)
		return -ENOMEM;
	mutex_lock(&lock);
	for (i = 0; i < count && !error; i++) {
		struct pair *pair = xa_load(&table, asked.ids[i]);

		if (!pair) {
			error = -ENOENT;
			continue;
		}
		kref_get(&pair->ref);
		file->pairs[file->count++] = pair;
	}
	mutex_unlock(&lock);
	fd = error ? error : anon_inode_getfd("slash_qdma_qpair", &pair_fops, file, O_RDWR | asked.flags);
	if (fd < 0)
		pair_file_free(file);
	return fd;
}

static long node_ioctl(struct file *file, unsigned int number, unsigned long user)
{
	struct info info;
	u32 size;
	int error;

	switch (number) {
	case INFO:
		error = take(&info, sizeof(info), 4, (void __user *)user, &size);
		if (error)
			return error;
		info = (struct info) { .qsets_max = MAX_PAIRS, .msix_qvecs = 8, .bdf = "0000:61:00.1" };
		return give(&info, sizeof(info), (void __user *)user, size);
	case PAIR_ADD:
		return pair_add((void __user *)user);
	case PAIR_OP:
		return pair_op((void __user *)user);
	case PAIR_FD:
		return pair_fd((void __user *)user);
	case BUF_CREATE:
		return buf_create((void __user *)user);
	default:
		return -ENOTTY;
	}
}

static const struct file_operations node_fops = {
	.owner = THIS_MODULE,
	.unlocked_ioctl = node_ioctl,
};

static struct miscdevice node = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "slash_qdma_ctl0",
	.mode = 0600,
	.fops = &node_fops,
};

static int __init stub_init(void)
{
	int error;

	queue = alloc_workqueue("slash_stub", WQ_UNBOUND, 0);
	if (!queue)
		return -ENOMEM;
	error = misc_register(&node);
	if (error)
		destroy_workqueue(queue);
	return error;
}

static void __exit stub_exit(void)
{
	struct page *page;
	struct pair *pair;
	unsigned long at;

	misc_deregister(&node);
	destroy_workqueue(queue);
	xa_for_each(&table, at, pair)
		kref_put(&pair->ref, pair_free);
	xa_for_each(&memory, at, page)
		__free_page(page);
	xa_destroy(&table);
	xa_destroy(&memory);
}

module_init(stub_init);
module_exit(stub_exit);
MODULE_DESCRIPTION("Stub of SLASH for tests");
MODULE_LICENSE("Dual MIT/GPL");
