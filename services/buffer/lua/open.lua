-- OpenGroups: dispatch. ARGV: book, epoch, then for each group: ordinal, samples, target step, GroupSpec (without
-- traces), and the TraceContext of each sample.
-- Reply: ok, opened, existing | no_run | fenced, epoch | closed
if not CFG.infra then return { 'no_run' } end
local book = ARGV[1]
local new, held, existing, at = {}, {}, 0, 3
while at <= #ARGV do
  if call('EXISTS', PREFIX .. 'g:' .. book .. ':' .. ARGV[at]) == 0 then
    new[#new + 1] = at
  else
    existing = existing + 1
    local group = load(book, ARGV[at])
    if group.state == 'open' and call('HGET', group.key, 'held') == '1' then held[#held + 1] = group end
  end
  at = at + 4 + tonumber(ARGV[at + 1])
end
if #new > 0 and call('HEXISTS', PREFIX .. 'n:' .. book, 'closed') == 1 then return { 'closed' } end
local refusal = refuse_epoch(tonumber(ARGV[2]))
if refusal then return refusal end

for _, group in ipairs(held) do unhold(group) end
local counters = PREFIX .. 'n:' .. book
local highest = tonumber(call('HGET', counters, 'max_step') or '-1')
call('SADD', PREFIX .. 'books', book)
for _, at in ipairs(new) do
  local ordinal, n, step = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local key = PREFIX .. 'g:' .. book .. ':' .. ordinal
  local record = { 'state', 'open', 'n', n, 'step', step, 'left', n, 'lost', 0, 'spec', ARGV[at + 3] }
  for i = 0, n - 1 do
    local id = call('XADD', STREAMS.w, '*', 'b', book, 'g', ordinal, 'i', i)
    for _, value in ipairs({ 's' .. i, 'q', 'e' .. i, 'w' .. id, 't' .. i, NOW, 'a' .. i, 0, 'c' .. i, ARGV[at + 4 + i] }) do
      record[#record + 1] = value
    end
  end
  for from = 1, #record, 1000 do
    call('HSET', key, unpack(record, from, math.min(from + 999, #record)))
  end
  call('ZADD', PREFIX .. 'step:' .. book .. ':' .. step, ordinal, ordinal)
  call('ZADD', PREFIX .. 'live:' .. book, ordinal, ordinal)
  if book ~= 'train' then call('ZADD', PREFIX .. 'all:' .. book, ordinal, ordinal) end
  count(book, 'g:dispatched', 1)
  count(book, 's:dispatched', n)
  count(book, 'g:open', 1)
  count(book, 's:open', n)
  count(book, 'state:open', 1)
  count(book, 'queued', n)
  emit('dispatch', book, ordinal, n, step, '', ARGV[2])
  highest = math.max(highest, step)
end
call('HSET', counters, 'max_step', highest)
commit()
return { 'ok', #new, existing }
