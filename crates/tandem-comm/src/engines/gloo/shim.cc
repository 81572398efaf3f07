// Gloo's point-to-point transport behind C functions: a mesh of TCP connections, and transfers on it. No exception leaves
// this file; why something failed is written to `why`, a buffer of the caller's of WHY_SIZE bytes.
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

// Runs `body`; after an exception says why and returns `otherwise`.
template <typename T, typename F>
T guarded(char* why, T otherwise, F body) {
  try {
    return body();
  } catch (const std::exception& e) {
    explain(why, e.what());
  } catch (...) {
    explain(why, "an exception that is no std::exception");
  }
  return otherwise;
}

// Gives up waits at their time. Gloo's own timeouts close all connections before their caller hears of it, and the peers
// could not be told why any more; an aborted wait leaves the connections to the caller.
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
      // Waits mostly end long before they are due. This thread sleeps until the last one's time whether it has ended or
      // not: then the next, due later, need not wake it.
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

// Longer than any deadline: the watch comes first.
constexpr auto NEVER = std::chrono::milliseconds(std::chrono::hours(24 * 3650));

// A receive that nobody sends to, on each connection. When a connection breaks, Gloo tells the transfers that wait for their
// turn, but neither one of which a part has arrived nor one of which a part has been sent: those would be waited for for ever.
// A sentinel is always told.
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
    // A wait that is aborted before it begins only looks.
    buffers_[peer]->abortWaitRecv();
    try {
      buffers_[peer]->waitRecv(nullptr, NEVER);
      return false;
    } catch (const std::exception&) {
      return true;
    }
  }

 private:
  // None of the callers' slots.
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
  // Before the context it goes.
  Sentinels sentinels;
  Watch watch;
};

struct TandemTransfer {
  std::unique_ptr<UnboundBuffer> buffer;
  int peer;
  bool receiving;
};

extern "C" {

// A mesh whose pairs listen, at the address `host` or, where that is empty, at the network interface `interface`.
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

// Where the pair for `peer` listens: the number of bytes, of which as many as fit are written.
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

// Closes all connections; what is under way fails, here and at the peers.
void tandem_mesh_close(TandemMesh* mesh) {
  char why[WHY_SIZE];
  for (int peer = 0; peer < mesh->context->size; peer++) {
    guarded(why, 0, [&] {
      if (auto& pair = mesh->context->getPair(peer)) pair->close();
      return 0;
    });
  }
}

// Begins a transfer. `data` must stay until the transfer is freed.
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
      // What was done before the connection broke is done.
      outcome = wait(std::chrono::milliseconds(0));
      if (outcome == LATE) outcome = BROKEN;
    }
    return static_cast<int>(outcome);
  });
}

// Afterwards Gloo no longer touches the transfer's data, whether it was done or not.
void tandem_transfer_free(TandemTransfer* transfer) { delete transfer; }

}  // extern "C"
