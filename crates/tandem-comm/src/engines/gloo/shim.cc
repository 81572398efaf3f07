// C interface to Gloo's point-to-point transport: a mesh of TCP connections, and transfers on it.
// No exception leaves this file; the reason of a failure is written to `why`, a caller's buffer of
// WHY_SIZE bytes.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gloo/transport/address.h>
#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>

namespace {

using Clock = std::chrono::steady_clock;
using gloo::transport::UnboundBuffer;

constexpr size_t WHY_SIZE = 512;
enum Outcome { DONE = 0, LATE = 1, BROKEN = 2 };

void explain(char* why, const char* what) {
  std::strncpy(why, what, WHY_SIZE - 1);
  why[WHY_SIZE - 1] = '\0';
}

// Runs `body`; on an exception writes the reason and returns `otherwise`.
template <typename T, typename F>
T guarded(char* why, T otherwise, F body) {
  try {
    return body();
  } catch (const std::exception& e) {
    explain(why, e.what());
  } catch (...) {
    explain(why, "an exception that is not a std::exception");
  }
  return otherwise;
}

// Aborts waits at their deadline. Gloo's own timeouts close all connections before the caller is
// told, so peers could no longer learn the reason; an aborted wait leaves them open.
class Watch {
 public:
  Watch() : thread_([this] { run(); }) {}

  ~Watch() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closing_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }

  template <typename F>
  Outcome during(UnboundBuffer& buffer, bool receiving, std::chrono::milliseconds limit, F wait) {
    std::lock_guard<std::mutex> one_at_a_time(waiting_);
    const auto due = Clock::now() + limit;
    bool earlier;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      buffer_ = &buffer;
      receiving_ = receiving;
      fired_ = false;
      due_ = due;
      earlier = due < asleep_until_;
    }
    if (earlier) wake_.notify_all();
    struct Disarm {
      Watch& watch;
      ~Disarm() {
        std::lock_guard<std::mutex> lock(watch.mutex_);
        watch.buffer_ = nullptr;
      }
    } disarm{*this};
    const bool done = wait();
    std::lock_guard<std::mutex> lock(mutex_);
    return done ? DONE : fired_ ? LATE : BROKEN;
  }

 private:
  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!closing_) {
      if (buffer_ != nullptr && !fired_ && Clock::now() >= due_) {
        fired_ = true;
        receiving_ ? buffer_->abortWaitRecv() : buffer_->abortWaitSend();
      }
      // Waits mostly end long before their deadline. The thread sleeps until the last known
      // deadline in any case, so that the next, later one need not wake it.
      const auto now = Clock::now();
      asleep_until_ = now + std::chrono::hours(1);
      if (due_ > now) asleep_until_ = std::min(asleep_until_, due_);
      wake_.wait_until(lock, asleep_until_);
    }
  }

  std::mutex waiting_, mutex_;
  std::condition_variable wake_;
  UnboundBuffer* buffer_ = nullptr;
  bool receiving_ = false, fired_ = false, closing_ = false;
  Clock::time_point due_ = Clock::time_point::min(), asleep_until_ = Clock::time_point::min();
  std::thread thread_;
};

// Longer than any deadline, so that the watch acts first.
constexpr auto NEVER = std::chrono::milliseconds(std::chrono::hours(24 * 3650));

// A receive without a sender, on each connection. When a connection breaks, Gloo fails the
// transfers that wait for their turn, but not a partially received or sent one, whose wait would
// never end. A sentinel always fails.
class Sentinels {
 public:
  explicit Sentinels(int size) : buffers_(size) {}

  void post(gloo::transport::Context& context, int peer) {
    buffers_[peer] = context.createUnboundBuffer(&room_, sizeof(room_));
    buffers_[peer]->recv(peer, SLOT, 0, sizeof(room_));
  }

  bool broken(int peer) {
    std::lock_guard<std::mutex> one_at_a_time(mutex_);
    if (!buffers_[peer]) return false;
    // A wait that is aborted before it begins only polls.
    buffers_[peer]->abortWaitRecv();
    try {
      buffers_[peer]->waitRecv(nullptr, NEVER);
      return false;
    } catch (const std::exception&) {
      return true;
    }
  }

 private:
  // No slot of a caller.
  static constexpr uint64_t SLOT = 0;
  std::mutex mutex_;
  std::vector<std::unique_ptr<UnboundBuffer>> buffers_;
  char room_ = 0;
};

}  // namespace

struct TandemMesh {
  explicit TandemMesh(int size) : sentinels(size) {}

  std::shared_ptr<gloo::transport::Device> device;
  std::shared_ptr<gloo::transport::Context> context;
  // Destroyed before the context.
  Sentinels sentinels;
  Watch watch;
};

struct TandemTransfer {
  std::unique_ptr<UnboundBuffer> buffer;
  int peer;
  bool receiving;
};

extern "C" {

// Creates a mesh whose pairs listen, at the address `host` or, if empty, at the network interface
// `interface`.
TandemMesh* tandem_mesh_new(int rank, int size, const char* host, const char* interface, uint64_t connect_ms, char* why) {
  return guarded(why, static_cast<TandemMesh*>(nullptr), [&] {
    gloo::transport::tcp::attr attr;
    attr.hostname = host;
    attr.iface = interface;
    auto mesh = std::make_unique<TandemMesh>(size);
    mesh->device = gloo::transport::tcp::CreateDevice(attr);
    mesh->context = mesh->device->createContext(rank, size);
    // A pair waits five times this long for its peer to connect.
    mesh->context->setTimeout(std::chrono::milliseconds(std::max<uint64_t>(connect_ms / 5, 1)));
    for (int peer = 0; peer < size; peer++) {
      if (peer != rank) mesh->context->createPair(peer);
    }
    return mesh.release();
  });
}

void tandem_mesh_free(TandemMesh* mesh) { delete mesh; }

// Returns the length of the address of the pair for `peer` and writes as much of it as fits.
size_t tandem_mesh_address(TandemMesh* mesh, int peer, uint8_t* out, size_t capacity, char* why) {
  return guarded(why, size_t{0}, [&] {
    const auto bytes = mesh->context->getPair(peer)->address().bytes();
    std::memcpy(out, bytes.data(), std::min(capacity, bytes.size()));
    return bytes.size();
  });
}

int tandem_mesh_connect(TandemMesh* mesh, int peer, const uint8_t* address, size_t len, char* why) {
  return guarded(why, static_cast<int>(BROKEN), [&] {
    mesh->context->getPair(peer)->connect(std::vector<char>(address, address + len));
    mesh->sentinels.post(*mesh->context, peer);
    return static_cast<int>(DONE);
  });
}

// Closes all connections; transfers in flight fail, here and at the peers.
void tandem_mesh_close(TandemMesh* mesh) {
  char why[WHY_SIZE];
  for (int peer = 0; peer < mesh->context->size; peer++) {
    guarded(why, 0, [&] {
      if (auto& pair = mesh->context->getPair(peer)) pair->close();
      return 0;
    });
  }
}

// Starts a transfer. `data` must stay until the transfer is freed.
TandemTransfer* tandem_transfer_new(
    TandemMesh* mesh, int receiving, int peer, uint64_t slot, void* data, size_t len, char* why) {
  return guarded(why, static_cast<TandemTransfer*>(nullptr), [&] {
    auto transfer = std::make_unique<TandemTransfer>();
    transfer->peer = peer;
    transfer->receiving = receiving != 0;
    transfer->buffer = mesh->context->createUnboundBuffer(data, len);
    if (receiving) {
      transfer->buffer->recv(peer, slot, 0, len);
    } else {
      transfer->buffer->send(peer, slot, 0, len);
    }
    return transfer.release();
  });
}

int tandem_transfer_wait(TandemMesh* mesh, TandemTransfer* transfer, uint64_t limit_ms, char* why) {
  return guarded(why, static_cast<int>(BROKEN), [&] {
    UnboundBuffer& buffer = *transfer->buffer;
    explain(why, "the wait was aborted");
    const auto wait = [&](std::chrono::milliseconds limit) {
      return mesh->watch.during(buffer, transfer->receiving, limit, [&] {
        return transfer->receiving ? buffer.waitRecv(nullptr, NEVER) : buffer.waitSend(nullptr, NEVER);
      });
    };
    auto outcome = wait(std::chrono::milliseconds(limit_ms));
    if (outcome == LATE && mesh->sentinels.broken(transfer->peer)) {
      // A transfer may have completed before the connection broke.
      outcome = wait(std::chrono::milliseconds(0));
      if (outcome == LATE) outcome = BROKEN;
    }
    return static_cast<int>(outcome);
  });
}

// Gloo no longer accesses the transfer's data afterwards, completed or not.
void tandem_transfer_free(TandemTransfer* transfer) { delete transfer; }

}  // extern "C"
