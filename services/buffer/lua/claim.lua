-- Claim: returned samples first, then new ones, each in the order of its stream. ARGV: worker, most samples.
-- Reply: ok, specs, claims; a claim is two elements: index of its spec, book, ordinal, sample, attempt
-- and queued ns, joined by spaces; TraceContext | no_run
if not CFG.infra then return { 'no_run' } end
local worker, room = ARGV[1], tonumber(ARGV[2])
local specs, known, claims = {}, {}, {}

local function hand_out(stream, id, fields)
  local book, ordinal, i = fields[2], fields[4], fields[6]
  local key = PREFIX .. 'g:' .. book .. ':' .. ordinal
  local v = call('HMGET', key, 'state', 's' .. i, 'e' .. i, 't' .. i, 'c' .. i)
  local entry = stream .. id
  if v[1] ~= 'open' or v[2] ~= 'q' or v[3] ~= entry then
    dequeue(entry)
    return
  end
  if not known[key] then
    specs[#specs + 1] = call('HGET', key, 'spec')
    known[key] = #specs
  end
  local attempt = call('HINCRBY', key, 'a' .. i, 1)
  call('HSET', key, 's' .. i, 'c', 'w' .. i, worker)
  count(book, 'queued', -1)
  count(book, 'claimed', 1)
  if attempt > 1 then count(book, 'redeliveries', 1) end
  claims[#claims + 1] = table.concat({ known[key] - 1, book, ordinal, i, attempt, v[4] }, ' ')
  claims[#claims + 1] = v[5]
  room = room - 1
end

for _, stream in ipairs({ 'r', 'w' }) do
  while room > 0 do
    local reply = call('XREADGROUP', 'GROUP', 'gym', worker, 'COUNT', room, 'STREAMS', STREAMS[stream], '>')
    if not reply or #reply == 0 then break end
    for _, entry in ipairs(reply[1][2]) do hand_out(stream, entry[1], entry[2]) end
  end
end
commit()
return { 'ok', specs, claims }
